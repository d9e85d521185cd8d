"""Attention on the host for a model on a device, which attends to the new entries of a prompt itself.

Where only part of the entries is on a side, each side returns its output and its log-sum-exp, and both are merged:
FlexGen (Sheng et al., 2023), section 4, with the running maximum and sum of FlashAttention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from millpond.cache.attention.paged import PagedAttention
from millpond.cache.attention.sparse_values import SparseValues
from millpond.cache.pages.page_table import PageTable
from millpond.cache.types import PromptChunk
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.kernels.decode_rules import DecodeRule, Reduce
from millpond.kernels.eager.softmax import lse_merge
from millpond.kernels.scattered_rows import attend_part


class Link(Protocol):
    """Copies between the memory of a device and that of the host."""

    def down(self, *tensors: Tensor) -> list[Tensor]:
        """Return copies of tensors of the device in the host's memory, complete."""
        ...

    def up(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of the host on the device."""
        ...


@dataclass(slots=True, eq=False)
class NearPass:
    """Rows of a prompt that are on the device, while their layer attends on the host.

    Attributes:
        link: Copies between both.
        q: Queries (Hq, Q, key_dim) on the device.
        k: Keys (Hkv, Q, key_dim) on the device.
        v: Values (Hkv, Q, value_dim) on the device.
        shape: Scale, soft cap and window of the layer, with its sinks on the device.
        out: Output (Hq, Q, value_dim) on the device; None where the host computed it whole.
    """

    link: Link
    q: Tensor
    k: Tensor
    v: Tensor
    shape: AttentionShape
    out: Tensor | None = None

    def attend(self, chunk: PromptChunk) -> Tensor:
        """Attend to new entries on the device and to stored ones on the host.

        `out` becomes the output; the log-sum-exp is returned on the host.
        """
        link, entries = self.link, chunk.entries
        n_past = entries.positions.shape[1] - len(chunk.q_pos)
        q_pos = chunk.q_pos.to(self.q.device)
        out, lse, _ = ops.prefill(PrefillArgs(self.q, self.k, self.v, q_pos, self.shape))
        if n_past:
            without_sink = replace(self.shape, sink_logits=None)  # which the device has counted
            keys, values = entries.keys[:, :n_past], entries.values[:, :n_past]
            past, past_lse = attend_part(
                chunk.q, keys, values, chunk.q_pos, entries.positions[:, :n_past], without_sink
            )
            out, lse = lse_merge(out, lse, link.up(past), link.up(past_lse.float()))
        self.out = out
        return link.down(lse)[0]


class HostAttention(PagedAttention):
    """Attention of a layer whose entries are in the host's memory.

    Attributes:
        near: Rows of the running pass on the device, set by `HostLayerCache`; None while all of it is on the host.
        sparse: Sparse values of decoding steps; None to read all. Layers with a window read all that it shows.
    """

    near: NearPass | None = None
    sparse: SparseValues | None = None

    def step(
        self, table: PageTable, rule: DecodeRule, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.sparse is None or self.shape.window or not bool((q_pos >= 0).any()):
            return super().step(table, rule, q, k, v, q_pos)
        return self.sparse.step(table, self.shape, q, k, v, q_pos)

    def chunk(
        self, chunk: PromptChunk, reduce: Reduce | None, decay: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        near = self.near
        if near is None or reduce is not None or not self._is_dense(chunk, near):
            return super().chunk(chunk, reduce, decay)
        lse = near.attend(chunk)
        value_dim = chunk.entries.values.shape[-1]
        return chunk.q.new_zeros(1).expand(*chunk.q.shape[:2], value_dim), lse, None

    def _is_dense(self, chunk: PromptChunk, near: NearPass) -> bool:
        """Whether a chunk is the whole pass, and its attention that to all entries."""
        selective = self._sequence_state.selective is not None or self._sequence_state.rolling is not None
        return not selective and chunk.entries.log_masses is None and chunk.q.shape[1] == near.q.shape[1]
