"""Shared parts of the benchmarks: machine, memory, report, peer processes."""
