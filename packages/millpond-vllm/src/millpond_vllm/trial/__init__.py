"""A user's own traffic, stock against settings."""
