"""Eviction policies: scores, protection, allocation, selection and merging over numbers and positions, never pages.

Imports: codec, errors, kernels, option_ranges.
"""
