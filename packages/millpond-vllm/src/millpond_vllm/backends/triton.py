"""Attention in Triton, whose full-attention layers evict."""

from __future__ import annotations

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from millpond_vllm.attention_backend import EvictingBackend, EvictingBuilder, ObservingImpl


class EvictingTritonBuilder(EvictingBuilder, TritonAttentionMetadataBuilder):
    """vLLM's builder without null blocks."""


class EvictingTritonImpl(ObservingImpl, TritonAttentionImpl):
    """vLLM's attention, which shows its queries."""


class EvictingTritonBackend(EvictingBackend, TritonAttentionBackend):
    """vLLM's backend, whose full-attention layers evict."""

    @staticmethod
    def get_impl_cls() -> type[EvictingTritonImpl]:
        """Return the attention."""
        return EvictingTritonImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingTritonBuilder]:
        """Return the builder."""
        return EvictingTritonBuilder
