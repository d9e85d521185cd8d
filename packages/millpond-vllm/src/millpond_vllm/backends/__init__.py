"""Attention backends of vLLM whose full-attention layers evict."""
