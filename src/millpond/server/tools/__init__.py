"""Calls of tools: how models write them, and how they are read out of a text that is still being written."""
