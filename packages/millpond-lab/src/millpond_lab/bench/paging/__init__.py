"""Replays of traces through the paging rules, and their hit rates."""
