"""Offloading plan: tiers of weights and KV, cost of a sweep over the layers, and search for the fastest plan."""
