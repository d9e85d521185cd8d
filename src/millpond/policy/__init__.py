"""Eviction policies: scores, protection, allocation, selection and merging. They see numbers and positions, never pages.

Imports: errors, kernels.
"""
