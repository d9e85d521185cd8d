"""Attention of a layer over its pages: paged, and over the latents of MLA models."""
