"""Offloading benchmark: tokens per second of a model that does not fit in memory, ours and of others, in one cap."""
