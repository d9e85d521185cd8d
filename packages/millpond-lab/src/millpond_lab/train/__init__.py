"""Training of the bundled models, their data, and their own measures. Importing this package loads nothing."""
