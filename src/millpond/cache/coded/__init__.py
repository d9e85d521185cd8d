"""Sequences in the codec `transform`: tokens of all heads in pages of codes, others as they are."""
