"""The ops in plain torch, one file each, and what they are made of. Shapes and meaning: see `kernels.op_set`."""
