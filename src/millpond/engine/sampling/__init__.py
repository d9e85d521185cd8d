"""Sampling: parameters, penalties, token choice and log probabilities."""
