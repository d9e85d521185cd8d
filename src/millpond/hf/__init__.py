"""Integration with transformers: the cache for `generate()` and the attention function that feeds it."""
