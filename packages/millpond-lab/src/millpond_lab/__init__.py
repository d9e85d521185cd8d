"""Evaluation, benchmarks, training and planning for Millpond."""
