"""Adapters for other evaluation harnesses; their modules import libraries that are optional."""
