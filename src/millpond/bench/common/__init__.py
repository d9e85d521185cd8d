"""Shared parts of the benchmarks: machine, memory, stopwatch, report, peer processes."""
