"""Sampling of tokens: parameters, penalties, token choice and log probabilities."""
