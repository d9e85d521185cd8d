"""Merging of evicted entries: rules, links, chains, and their reference."""
