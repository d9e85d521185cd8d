"""Attention for CPUs, whose full-attention layers evict."""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from millpond_vllm.attention_backend import EvictingBackend, EvictingBuilder, ObservingImpl


class EvictingCPUBuilder(EvictingBuilder, CPUAttentionMetadataBuilder):
    """vLLM's builder without null blocks."""


class EvictingCPUImpl(ObservingImpl, CPUAttentionBackendImpl):
    """vLLM's attention, which shows its queries."""


class EvictingCPUBackend(EvictingBackend, CPUAttentionBackend):
    """vLLM's backend, whose full-attention layers evict."""

    @staticmethod
    def get_impl_cls() -> type[EvictingCPUImpl]:
        """Return the attention."""
        return EvictingCPUImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingCPUBuilder]:
        """Return the builder."""
        return EvictingCPUBuilder
