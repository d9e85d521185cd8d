"""Peer implementations on the same model and prompts, each in an environment of its own."""
