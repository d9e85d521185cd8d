"""Chunks of text stored once and reused inside prompts (Cache-Craft)."""
