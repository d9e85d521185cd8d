"""Tiny GGUF files."""
