"""`bench kernels`: attention kernels as a share of the memory bandwidth."""
