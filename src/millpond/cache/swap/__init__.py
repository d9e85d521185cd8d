"""Pages moved out of the pool to host memory or files, and back."""
