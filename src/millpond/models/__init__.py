"""Model families and model loading. Importing this package loads nothing."""
