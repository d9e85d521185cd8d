"""Calibration of codecs on a model: measured once, loaded with the model."""
