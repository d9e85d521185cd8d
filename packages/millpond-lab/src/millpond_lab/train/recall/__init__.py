"""Training of pond-recall."""
