"""Plots of results, one file per figure."""
