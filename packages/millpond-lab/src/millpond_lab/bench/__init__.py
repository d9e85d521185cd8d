"""Benchmarks of speed and memory, each with a baseline in the same run.

Imports: budget, cache, cli, codec, engine, errors, hf, kernels, methods, models, peer_process, policy, runner, tiers.
"""
