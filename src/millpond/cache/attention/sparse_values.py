"""Decoding steps that score all keys and read the values of the entries with the most attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.cache.entries.compaction import rows_at, slots_of
from millpond.cache.pages.page_table import PageTable
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, EntryRows
from millpond.kernels.eager.softmax import soft_cap, softmax_with_sink, wide


@dataclass(slots=True)
class SparseValues:
    """Sparse attention of FlexGen: of each head only the largest weights count.

    See Sheng et al., 2023, section 5. The weights are those of the softmax over all entries, and are not scaled to sum
    to 1. Query heads that share a KV head read the values of the same entries, those with the most attention of all of
    them together.

    Attributes:
        share: Share of the entries of each KV head whose values are read, above 0 and below 1, rounded up.
        bytes_read: Bytes of keys and of values that were read so far.
    """

    share: float
    bytes_read: int = 0

    def step(
        self, table: PageTable, shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store the new entries, and attend to the keys of all and to the values of some.

        Args:
            table: Table of a layer that keeps all entries, plain, with a page for each new one.
            shape: Scale, soft cap and sinks of the layer, without a window.
            q: Queries (S, Hq, key_dim).
            k: Keys (S, Hkv, key_dim).
            v: Values (S, Hkv, value_dim).
            q_pos: Positions (S,) int32, -1 for a sequence without a token.

        Returns:
            (S, Hq, value_dim) and the log-sum-exp (S, Hq).
        """
        n_kv_heads, arrays, dtype = k.shape[1], table.pool.arrays, wide(q.dtype)
        active = (q_pos >= 0).repeat_interleave(n_kv_heads)
        _append(table, k, v, q_pos, active)
        width = int(table.lens.max())
        ids, valid = slots_of(table, table.pages, table.lens, width)
        valid &= active[:, None]
        rows = q.to(dtype).reshape(len(ids), -1, q.shape[-1])
        logits = soft_cap(rows @ rows_at(arrays.keys, ids).to(dtype).transpose(1, 2) * shape.scale, shape.softcap)
        sink = None
        if shape.sink_logits is not None:
            sink = shape.sink_logits.to(dtype).view(n_kv_heads, -1).repeat(len(q), 1)[..., None]
        p, lse = softmax_with_sink(logits, valid[:, None], sink)
        counts = torch.ceil(valid.sum(1) * self.share - 1e-6).long()
        top = p.sum(1).topk(int(counts.max()), 1).indices
        read = torch.arange(top.shape[1]) < counts[:, None]
        values = rows_at(arrays.values, ids.gather(1, top).masked_fill(~read, 0)).to(dtype)
        weights = p.gather(2, top[:, None].expand(-1, p.shape[1], -1)).masked_fill(~read[:, None], 0.0)
        out = (weights @ values.masked_fill(~read[..., None], 0.0)).reshape(*q.shape[:2], -1).to(q.dtype)
        size = arrays.dtype.itemsize
        self.bytes_read += int(valid.sum()) * arrays.key_dim * size + int(counts.sum()) * arrays.value_dim * size
        return out, lse.reshape(q.shape[:2]).float()


def _append(table: PageTable, k: Tensor, v: Tensor, q_pos: Tensor, active: Tensor) -> None:
    """Store one entry in each region of the `active` ones (R,) bool."""
    n = len(active)
    positions = q_pos.repeat_interleave(k.shape[1])[:, None]
    index = torch.zeros(n, 1, dtype=torch.int32)
    entries = EntryRows(
        table.lens.clone(), active.int(), index, k.reshape(n, 1, -1), v.reshape(n, 1, -1), positions.int()
    )
    ops.write(table.regions, entries)
    table.lens.add_(active.int())
