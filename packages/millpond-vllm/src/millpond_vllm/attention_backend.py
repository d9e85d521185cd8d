"""Attention backends that hide null blocks and show queries to the worker's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from millpond_vllm.block_manager import EvictingSpec
from millpond_vllm.row_compaction import without_null_blocks

if TYPE_CHECKING:
    from millpond_vllm.worker_state import WorkerState

#: Attributes of vLLM's layers and metadata that this package adds.
STATE, STEP = "millpond_state", "millpond_step"


def state_of(layer: Any) -> tuple[WorkerState, int] | None:
    """Return the worker's state and the layer's index in it; None for a layer that does not evict."""
    found: tuple[WorkerState, int] | None = getattr(layer, STATE, None)
    return found


class EvictingBuilder:
    """Metadata without null blocks: shorter rows, and lengths to match."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Build the metadata of a step."""
        given = common_attn_metadata
        spec: Any = self.kv_cache_spec  # type: ignore[attr-defined]
        if not isinstance(spec, EvictingSpec):
            return super().build(common_prefix_len, given, fast_build)  # type: ignore[misc]
        block = self.block_size  # type: ignore[attr-defined]
        rows, lengths = without_null_blocks(given.block_table_tensor, given.seq_lens, block)
        given = given.replace(block_table_tensor=rows, seq_lens=lengths, _num_computed_tokens_cache=None)
        metadata = super().build(common_prefix_len, given, fast_build)  # type: ignore[misc]
        state = self._state()
        if state is not None:
            setattr(metadata, STEP, state.plan_step(given, common_attn_metadata.seq_lens))
        return metadata

    def _state(self) -> WorkerState | None:
        from millpond_vllm.compat import attention_layers

        layers = attention_layers(self.vllm_config, self.layer_names)  # type: ignore[attr-defined]
        found = state_of(next(iter(layers.values()), None))
        return None if found is None else found[0]


class ObservingImpl:
    """Attention that shows its queries to the state of the worker."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, *args: Any, **kw: Any
    ) -> Any:
        """Attend as vLLM does, then remember what the next event needs."""
        out = super().forward(layer, query, key, value, kv_cache, metadata, *args, **kw)  # type: ignore[misc]
        found = state_of(layer)
        if metadata is None or found is None:
            return out
        state, index = found
        step = getattr(metadata, STEP, None)
        if step is not None:
            state.observe(index, query, key, value, step)
        return out


def evicting_spec(spec: Any) -> Any:
    """Return the specification of a layer that evicts, or `spec` as it is."""
    if type(spec) is FullAttentionSpec and not spec.non_causal and not spec.sliding_window:
        return EvictingSpec.of(spec)
    return spec


class EvictingCPUBuilder(EvictingBuilder, CPUAttentionMetadataBuilder):
    """vLLM's builder for CPUs without null blocks."""


class EvictingCPUImpl(ObservingImpl, CPUAttentionBackendImpl):
    """vLLM's attention for CPUs, which shows its queries."""


class EvictingCPUBackend(CPUAttentionBackend):
    """vLLM's backend for CPUs, whose full-attention layers evict."""

    @staticmethod
    def get_impl_cls() -> type[EvictingCPUImpl]:
        """Return the attention."""
        return EvictingCPUImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingCPUBuilder]:
        """Return the builder."""
        return EvictingCPUBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the specification of a layer's cache."""
        return evicting_spec(spec)
