"""Memory of the cache: page pools, page tables, quantized pages, reference counts and limits."""
