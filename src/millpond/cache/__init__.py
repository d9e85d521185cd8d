"""The KV cache of a batch: page pools, page tables, and the steps that write, attend, plan and evict.

Imports: budget, codec, errors, kernels, option_files, option_ranges, policy, registry, tiers.
"""
