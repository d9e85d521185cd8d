"""FlashAttention, whose full-attention layers evict."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from millpond_vllm.attention_backend import EvictingBackend, EvictingBuilder, ObservingImpl


class EvictingFlashAttentionBuilder(EvictingBuilder, FlashAttentionMetadataBuilder):
    """vLLM's builder without null blocks."""


class EvictingFlashAttentionImpl(ObservingImpl, FlashAttentionImpl):
    """vLLM's attention, which shows its queries."""


class EvictingFlashAttentionBackend(EvictingBackend, FlashAttentionBackend):
    """vLLM's backend, whose full-attention layers evict."""

    @staticmethod
    def get_impl_cls() -> type[EvictingFlashAttentionImpl]:
        """Return the attention."""
        return EvictingFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingFlashAttentionBuilder]:
        """Return the builder."""
        return EvictingFlashAttentionBuilder
