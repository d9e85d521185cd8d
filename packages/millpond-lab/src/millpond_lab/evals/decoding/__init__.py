"""Decoding for evaluation: batches, greedy answers, likelihoods and recorded attention."""
