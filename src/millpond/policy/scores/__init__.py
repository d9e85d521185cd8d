"""Eviction scores: how much an entry matters, one score a file."""
