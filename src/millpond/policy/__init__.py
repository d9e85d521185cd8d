"""Eviction policies: scores, protection, allocation, selection and merging over numbers and positions, never pages."""
