"""Stored keys and values of text chunks, for prompts that hold them anywhere (Cache-Craft, arXiv:2502.15734)."""
