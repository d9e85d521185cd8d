"""Batched forward passes over per-sequence caches, for the engine's models.

Imports: budget, cache, codec, errors, hf, kernels, models, option_files, policy.
"""
