"""Backends of a loader: who carries its reads out."""
