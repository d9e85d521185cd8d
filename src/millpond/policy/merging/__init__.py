"""Merging of evicted entries into kept ones."""
