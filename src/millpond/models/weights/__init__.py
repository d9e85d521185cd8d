"""Weights of a model that stay in the files they were saved in, and are read layer by layer."""
