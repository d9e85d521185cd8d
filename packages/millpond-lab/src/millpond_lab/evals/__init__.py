"""Evaluation of quality: tasks, decoding with the evicting cache, intervals, reports."""
