"""Benchmarks of speed and memory, each with a baseline in the same run."""
