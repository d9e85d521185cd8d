"""`bench kernels`: attention kernels beside the memory bandwidth."""
