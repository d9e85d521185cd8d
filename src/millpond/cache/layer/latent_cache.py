"""Cache of a layer whose model stores one latent per token and expands it to keys and values (MLA)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from millpond.cache.attention.paged import PagedAttention
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.page_table import PageTable
from millpond.cache.state.positions import ForwardSpan
from millpond.cache.types import Entries, PromptChunk
from millpond.errors import UnsupportedModelError
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, EntryRows, PaddedEntries, WindowSignalArgs
from millpond.kernels.decode_rules import DecodeRule, Evict, Reduce, Signal, choose_evicted
from millpond.kernels.eager import softmax


class LatentExpansion:
    """Per-head keys and values of one pass: of the kept tokens, then of the new ones.

    Args:
        keys: Keys (S, H, N, key_dim).
        values: Values (S, H, N, value_dim).
        kept: Positions (S, n) int32 of the first n columns.
        start: Columns that the layer had seen before this pass.
    """

    def __init__(self, keys: Tensor, values: Tensor, kept: Tensor, start: int) -> None:
        self.keys, self.values, self.start = keys, values, start
        self._n_kept = kept.shape[1]
        self._positions = torch.full((keys.shape[0], keys.shape[2]), -1, dtype=torch.int32, device=keys.device)
        self._positions[:, : self._n_kept] = kept
        self._order = self._sorted = self._positions

    @property
    def n_heads(self) -> int:
        return self.keys.shape[1]

    def place(self, span: ForwardSpan) -> None:
        """Set the positions of the new tokens of (a part of) this pass."""
        first = self._n_kept + span.start - self.start
        self._positions[:, first : first + span.length] = span.grid()
        self._sorted, self._order = self._positions.sort(1)

    def of(self, sequence: slice, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (S, H, n, D) of the tokens at `positions` (S, n), any where -1."""
        ranks = torch.searchsorted(self._sorted[sequence].contiguous(), positions.contiguous())
        columns = self._order[sequence].gather(1, ranks.clamp(max=self._order.shape[1] - 1))
        index = columns[:, None, :, None]
        keys, values = self.keys[sequence], self.values[sequence]
        return (
            keys.gather(2, index.expand(-1, self.n_heads, -1, keys.shape[-1])),
            values.gather(2, index.expand(-1, self.n_heads, -1, values.shape[-1])),
        )


class MLAAttention(PagedAttention):
    """Attention to the expansion of a pass if there is one, else to the stored entries.

    Attributes:
        expansion: Expansion of the running pass, set by `LatentCache`.
    """

    expansion: LatentExpansion | None = None

    def value_dim(self, v: Tensor) -> int:
        return super().value_dim(v) if self.expansion is None else self.expansion.values.shape[-1]

    def chunk(
        self, chunk: PromptChunk, reduce: Reduce | None, decay: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.expansion is None:
            return super().chunk(chunk, reduce, decay)
        entries = self._expanded(chunk.sequence, chunk.entries)
        out, lse, sums = super().chunk(chunk._replace(entries=entries), None if reduce is None else Reduce.SUM, decay)
        if reduce is Reduce.MAX:  # the largest of all heads, query by query: column sums per head do not tell it
            return out, lse, self._window_by_query(chunk.q, chunk.q_pos, entries, reduce, decay)
        if sums is not None and reduce is Reduce.MEAN:
            sums = sums / chunk.q.shape[0]
        return out, lse, None if sums is None else sums.sum(0, keepdim=True)

    def look_back(self, sequence: int, q: Tensor, q_pos: Tensor, entries: Entries, reduce: Reduce) -> Tensor:
        if self.expansion is None:
            return super().look_back(sequence, q, q_pos, entries, reduce)
        return self._window_by_query(q, q_pos, self._expanded(sequence, entries), reduce)

    def keys(self, sequence: int, entries: Entries) -> Tensor:
        return self._expanded(sequence, entries).keys

    def contents(self, table: PageTable, entries: Entries, part: Literal["keys", "values"]) -> Tensor:
        """Refuse to read latents without an expansion.

        Raises:
            UnsupportedModelError: the stored entries are latents.
        """
        if self.expansion is None:
            return super().contents(table, entries, part)
        raise UnsupportedModelError(
            f"layer {self.index} stores latents (MLA), one for all heads, so a score cannot look at its {part}; use a "
            "method that scores by attention (h2o, snapkv, tova) or by position (streaming, window)"
        )

    def _expanded(self, sequence: int, entries: Entries) -> Entries:
        """Return entries with keys and values of each head, (H, N, D), at the positions of all."""
        if self.expansion is None:
            return entries
        (keys,), (values,) = self.expansion.of(slice(sequence, sequence + 1), entries.positions)
        return Entries(keys, values, entries.positions.expand(len(keys), -1), entries.scores)

    def _window_by_query(
        self, q: Tensor, q_pos: Tensor, entries: Entries, reduce: Reduce, decay: float = 1.0
    ) -> Tensor:
        """Return sum_i decay**(w - 1 - i) reduce_h A[h, i, j], (1, N), over queries q (Hq, w, D)."""
        total = torch.zeros(1, entries.positions.shape[1], device=q.device)
        for i in range(q.shape[1]):
            one = q[:, i : i + 1], entries.keys, q_pos[i : i + 1], entries.positions
            by_head = ops.window_signal(WindowSignalArgs(*one, self.shape, reduce))
            total = decay * total + softmax.reduce_group(by_head, reduce, 0)
        return total

    def step(
        self, table: PageTable, rule: DecodeRule, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Decode as `ops.decode` with keys of the expansion: the same scores, ties and protection."""
        if self.expansion is None:
            return super().step(table, rule, q, k, v, q_pos)
        stored = int(table.lengths().max(initial=0))
        dense = ops.read(table.regions, stored)
        positions = torch.cat([dense.positions, q_pos[:, None]], 1)
        out, lse, p = self._attention(q, positions, q_pos[:, None])
        received = softmax.reduce_group(p, rule.reduce, 1).float()
        self._store(table, rule, k, v, q_pos[:, None], positions, dense, received)
        return out, lse

    def _attention(self, q: Tensor, positions: Tensor, q_pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the attention of `q` over the tokens at `positions`.

        The results are the output (S, Hq, value_dim), log-sum-exp (S, Hq) and probabilities (S, Hq, n).
        """
        assert self.expansion is not None, "the model's attention came back before its update"
        shape, n_seq, n_heads = self.shape, q.shape[0], self.expansion.n_heads
        wide = softmax.wide(q.dtype)
        keys, values = (t.to(wide) for t in self.expansion.of(slice(None), positions))
        visible = (positions >= 0) & (q_pos >= 0)
        if shape.window:
            visible &= q_pos - positions < shape.window
        rows = q.to(wide).view(n_seq, n_heads, -1, q.shape[-1])
        logits = softmax.soft_cap(rows @ keys.transpose(-1, -2) * shape.scale, shape.softcap)
        sink = None if shape.sink_logits is None else shape.sink_logits.to(wide).view(1, n_heads, -1, 1)
        p, lse = softmax.softmax_with_sink(logits, visible[:, None, None], sink)
        out = (p @ values).flatten(1, 2)
        return out.to(q.dtype), lse.flatten(1, 2).float(), p.flatten(1, 2)

    def _store(
        self,
        table: PageTable,
        rule: DecodeRule,
        k: Tensor,
        v: Tensor,
        q_pos: Tensor,
        positions: Tensor,
        dense: PaddedEntries,
        received: Tensor,
    ) -> None:
        """Gather scores; store the new entry (the last column) after the others or over one."""
        lens, stored = table.lens, positions.shape[1] - 1
        active = q_pos[:, 0] >= 0
        old = torch.nn.functional.pad(dense.scores, (0, 1))
        new = {Signal.NONE: old, Signal.SUM: rule.decay * old + received, Signal.LAST: received}[rule.signal]
        scores = torch.where(active[:, None], new, old)
        grows = active & ((lens < table.capacities) | (rule.evict is Evict.NEVER))
        victim = choose_evicted(rule, scores, positions, q_pos, table.recent, self.shape.window, 1)
        stores = grows | (active & (victim < stored))
        slot = torch.where(grows, lens.long(), victim)
        if rule.signal is Signal.NONE:  # nothing but the new entry changes
            start, count = slot.int(), stores.int()
            index = torch.full((len(lens), 1), stored, dtype=torch.int32, device=lens.device)
        else:
            start, count = torch.zeros_like(lens), lens + grows.int()
            index = torch.arange(stored + 1, dtype=torch.int32, device=lens.device).repeat(len(lens), 1)
            index[stores, slot[stores]] = stored
        keys, values = (torch.cat([a, b.to(a.dtype)], 1) for a, b in ((dense.keys, k), (dense.values, v)))
        ops.write(table.regions, EntryRows(start, count, index, keys, values, positions, scores))
        lens += grows.int()


class LatentCache(LayerCache):
    """A `LayerCache` of latents of `latent_dim` and `rope_dim` numbers.

    Entries of another shape are cached as in a `LayerCache`.
    """

    attention: MLAAttention
    _attention_type = MLAAttention

    def __init__(self, *args: Any, latent_dim: int, rope_dim: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dims = (latent_dim, rope_dim)
        self._offered: tuple[Tensor, Tensor] | None = None
        self._kept = torch.zeros(0, 0, dtype=torch.int32)

    # ------------------------------------------------------------------ to the model and back

    def before_rope(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kept latents (padded, in any order), then the new ones: (S, 1, n + Q, dim)."""
        self._offered = self.attention.expansion = None
        if (k.shape[-1], v.shape[-1]) != self._dims or k.shape[1] != 1:
            return k, v
        # what is attended to is what is stored, so that no split of a text into passes changes the result
        storage = self._pool(*self._dims, k.dtype, k.device).arrays.dtype
        k, v = self._offered = k.to(storage).to(k.dtype), v.to(storage).to(v.dtype)
        table = self._table
        if table is None or table.n_seq != k.shape[0]:
            self._kept = torch.zeros(k.shape[0], 0, dtype=torch.int32, device=k.device)
            return k, v
        dense = ops.read(table.regions, int(table.lengths().max(initial=0)))
        self._kept = dense.positions
        return torch.cat([dense.keys[:, None].to(k.dtype), k], 2), torch.cat([dense.values[:, None].to(v.dtype), v], 2)

    def after_rope(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new latents; `k` and `v` (S, H, n + Q, D) are the model's expansion of all."""
        if self._offered is None:
            return k, v
        self.attention.expansion = LatentExpansion(k, v, self._kept, self.columns)
        return self._offered

    def forget(self) -> None:
        """Drop the expanded keys of the last pass, which only a rollback needs."""
        self._offered = self.attention.expansion = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape, hidden: Tensor | None = None
    ) -> Tensor:
        """Attend as `LayerCache.attend` to latents k and v; the output has the model's size."""
        if self.attention.expansion is not None:
            span = self.tracker.span(self.columns, q.shape[2], q.shape[0], mask, q.device)
            self.attention.expansion.place(span)
        return super().attend(q, k, v, mask, shape, hidden)

    def attend_newest(
        self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, hidden: Tensor | None = None
    ) -> Tensor:
        states = None if hidden is None else hidden[:, None]
        return self.attend(q[:, :, None], k[:, :, None], v[:, :, None], None, shape, states)[:, :, 0]

    def reset(self) -> None:
        self.forget()
        super().reset()
