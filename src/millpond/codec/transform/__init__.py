"""Codec of stored entries in a transform that was fitted to a model: pages of fixed size at half a bit to four bits."""
