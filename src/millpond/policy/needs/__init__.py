"""What policies may need beyond keys, values and attention, and the protocols of it."""
