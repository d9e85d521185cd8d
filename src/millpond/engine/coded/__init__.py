"""Sequences of requests in the storage codec: where they are stored, swapped or sent."""
