"""Training of pond-text."""
