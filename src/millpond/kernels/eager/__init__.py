"""The ops in plain torch, one file each, and their helpers. Shapes and meaning: see `kernels.op_set`."""
