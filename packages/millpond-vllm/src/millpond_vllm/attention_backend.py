"""What attention backends do otherwise where requests evict: hide null blocks, and show queries to the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import FullAttentionSpec

from millpond_vllm import compat
from millpond_vllm.block_manager import EvictingSpec
from millpond_vllm.methods import reads_while_decoding
from millpond_vllm.row_compaction import without_null_blocks
from millpond_vllm.settings import KEY, EngineSettings

if TYPE_CHECKING:
    from millpond_vllm.worker_state import WorkerState

#: Attributes of vLLM's layers and metadata that this package adds.
STATE, STEP = "millpond_state", "millpond_step"


def state_of(layer: Any) -> tuple[WorkerState, int] | None:
    """Return the worker's state and the layer's index in it; None for a layer that does not evict."""
    found: tuple[WorkerState, int] | None = getattr(layer, STATE, None)
    return found


class EvictingBuilder:
    """Metadata without null blocks: shorter rows, and lengths to match on the device and on the host.

    What a recorded graph reads lies in buffers of its own, whose addresses stay.
    """

    #: Metadata of another group has other null blocks, so it is never taken with this group's rows.
    supports_update_block_table = False
    _buffers: tuple[Tensor, Tensor] | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return which batches may run as one recorded graph, where the attention's Python is not run.

        Prompts never do: their queries are remembered for the event behind them. Tokens that are decoded do, unless
        the method reads their queries too; vLLM then records the parts between the attention layers.
        """
        support: AttentionCGSupport = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        if not isinstance(kv_cache_spec, EvictingSpec):
            return support
        policy = EngineSettings.parse((vllm_config.additional_config or {}).get(KEY)).policy()
        reads = reads_while_decoding(policy)
        most = AttentionCGSupport.NEVER if reads else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return min(support, most, key=lambda one: int(one.value))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Build the metadata of a step."""
        given = common_attn_metadata
        spec: Any = self.kv_cache_spec  # type: ignore[attr-defined]
        state = self._state()
        if not isinstance(spec, EvictingSpec) or state is None:
            return super().build(common_prefix_len, given, fast_build)  # type: ignore[misc]
        parts = state.block // spec.block_size
        rows, lengths = without_null_blocks(given.block_table_tensor, given.seq_lens, spec.block_size, parts)
        rows, lengths = self._kept_in_place(rows, lengths)
        host = state.nulls.shortened(given.seq_lens_cpu_upper_bound, given)
        longest = given.max_seq_len if host is None else max(1, int(host.max()))
        given = given.replace(
            block_table_tensor=rows,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=host,
            max_seq_len=longest,
            _num_computed_tokens_cache=None,
        )
        metadata = super().build(common_prefix_len, given, fast_build)  # type: ignore[misc]
        if parts > 1:  # the worker counts in blocks of the manager
            given = given.replace(block_table_tensor=rows[:, ::parts] // parts)
        setattr(metadata, STEP, state.plan_step(given, common_attn_metadata.seq_lens))
        return metadata

    def _kept_in_place(self, rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and lengths at the addresses that recorded graphs read; as they are where none is recorded."""
        config = self.vllm_config  # type: ignore[attr-defined]
        if not config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            return rows, lengths
        if self._buffers is None:
            most = max(config.scheduler_config.max_num_seqs, config.compilation_config.max_cudagraph_capture_size or 0)
            most = max(most, len(rows))
            self._buffers = rows.new_zeros(most, rows.shape[1]), lengths.new_zeros(most)
        table, counts = self._buffers
        if len(rows) > len(table) or rows.shape[1] != table.shape[1]:
            return rows, lengths  # a batch of another shape than any graph
        return table[: len(rows)].copy_(rows), counts[: len(rows)].copy_(lengths)

    def _state(self) -> WorkerState | None:
        layers = compat.attention_layers(self.vllm_config, self.layer_names[:1])  # type: ignore[attr-defined]
        found = state_of(next(iter(layers.values()), None))
        return None if found is None else found[0]


class ObservingImpl:
    """Attention that shows its queries to the state of the worker."""

    shows_queries = True

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
            state.observe(index, plain_queries(layer, query), key, value, step)
        return out


def plain_queries(layer: Any, query: Tensor) -> Tensor:
    """Return queries (T, Hq, D) in a dtype that scores read: some backends take them in 8 bits, with a factor."""
    if query.dtype.itemsize > 1:
        return query
    plain: Tensor = (query.float() * layer._q_scale.to(torch.float32)).to(layer.dtype)
    return plain


class EvictingBackend:
    """A backend whose layers of full attention evict."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the specification of a layer's cache."""
        return evicting_spec(super().customize_spec(spec))  # type: ignore[misc]


def evicting_spec(spec: Any) -> Any:
    """Return the specification of a layer that evicts, or `spec` as it is."""
    if type(spec) is FullAttentionSpec and not spec.non_causal and not spec.sliding_window:
        return EvictingSpec.of(spec)
    return spec
