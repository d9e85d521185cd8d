"""Decoding steps on a GPU as recorded graphs, which cost their kernels and not the launches of each."""
