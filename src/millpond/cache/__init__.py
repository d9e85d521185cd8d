"""The KV cache of a batch: page pools, page tables, and the steps that write, attend, plan and evict."""
