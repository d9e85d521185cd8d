"""Paging rules that ours are compared with, and replays of traces through them."""
