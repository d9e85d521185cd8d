"""Batched forward passes over per-sequence caches: what the engine runs its models with.

Imports: budget, cache, codec, errors, hf, kernels, models, policy.
"""
