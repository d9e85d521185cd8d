"""Offloading plan: where weights and KV lie, what a sweep over the layers costs, and which plan is the fastest."""
