"""What a model shows to a policy: output projections, rotations, predictions, entropies, reconstruction."""
