"""Batched forward passes over per-sequence caches: what the engine runs its models with."""
