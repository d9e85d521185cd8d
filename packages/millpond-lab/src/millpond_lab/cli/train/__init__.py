"""`millpond train`: commands that train and analyse the bundled models."""
