"""Ops in plain torch, one file each, and their helpers; shapes and meaning as in `kernels.ops`."""
