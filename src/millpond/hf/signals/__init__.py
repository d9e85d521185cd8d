"""Signals of a model for policies: output projections, rotations, predictions, entropies, reconstruction."""
