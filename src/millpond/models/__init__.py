"""What a model family needs, and where models come from. Importing this package loads nothing."""
