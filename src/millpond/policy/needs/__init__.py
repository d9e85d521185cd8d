"""Protocols of signals that policies need besides keys, values and attention."""
