"""FlashInfer, whose full-attention layers evict."""

from __future__ import annotations

from vllm.v1.attention.backends.flashinfer import FlashInferBackend, FlashInferImpl, FlashInferMetadataBuilder

from millpond_vllm.attention_backend import EvictingBackend, EvictingBuilder, ObservingImpl


class EvictingFlashInferBuilder(EvictingBuilder, FlashInferMetadataBuilder):
    """vLLM's builder without null blocks."""


class EvictingFlashInferImpl(ObservingImpl, FlashInferImpl):
    """vLLM's attention, which shows its queries."""


class EvictingFlashInferBackend(EvictingBackend, FlashInferBackend):
    """vLLM's backend, whose full-attention layers evict."""

    @staticmethod
    def get_impl_cls() -> type[EvictingFlashInferImpl]:
        """Return the attention."""
        return EvictingFlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingFlashInferBuilder]:
        """Return the builder."""
        return EvictingFlashInferBuilder
