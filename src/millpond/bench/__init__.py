"""Benchmarks of speed and memory, each beside what it is compared with.

Imports: budget, cache, codec, errors, hf, kernels, methods, peer_process, policy.
"""
