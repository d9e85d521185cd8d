"""Batched forward passes over per-sequence caches, for the engine's models."""
