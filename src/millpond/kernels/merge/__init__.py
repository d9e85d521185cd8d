"""Merging of entries: rules, links, chains, and their reference."""
