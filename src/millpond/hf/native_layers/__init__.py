"""Decoder layers and linear layers replaced by native kernels while decoding."""
