"""Eviction plans carried to the pages: head budgets, merging and what a policy sees."""
