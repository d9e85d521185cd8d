"""Fit of the predictor of discard bits, which rules of the prefix cache evict by."""
