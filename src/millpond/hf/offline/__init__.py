"""Patterns and filters computed from a model before it is used."""
