"""Integration with transformers: the cache for `generate()` and the attention function that feeds it.

Imports: budget, cache, codec, errors, kernels, methods, models, option_files, policy, presets, scalar.
"""
