"""Stored keys and values of text chunks, for prompts that contain them anywhere (Cache-Craft, arXiv:2502.15734)."""
