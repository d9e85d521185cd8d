"""Attention to sinks, the newest entries and retrieved blocks, over a cache that stores everything (InfLLM)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from millpond.cache.entries.compaction import rows_at
from millpond.cache.pages.page_table import PageTable
from millpond.cache.per_sequence import PerSequence
from millpond.cache.rope_protocol import RotaryEmbedding
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, EntryRows
from millpond.kernels.eager.softmax import soft_cap, softmax_with_sink, wide
from millpond.policy.needs import BlockLookup

#: Rows of queries whose logits are held at a time.
BLOCK = 64

#: Reads keys (H, n, key_dim) and values (H, n, value_dim) at positions (n,).
Fetch = Callable[[Tensor], tuple[Tensor, Tensor]]


class Blocks(NamedTuple):
    """What is remembered of one sequence; replaced, never written to."""

    budget: int
    means: Tensor  #: (n, Hq, key_dim), the representative key of each full block and query head, before RoPE
    scores: Tensor  #: (Hq, m) float32, local attention received by the newest entries, those in no block and no sink


class Passing(NamedTuple):
    """One pass of one sequence, in the wide dtype."""

    fetch: Fetch
    shape: AttentionShape
    rope: RotaryEmbedding | None
    budget: int
    local: int

    def place(self, x: Tensor, positions: Tensor, at: int) -> Tensor:
        """Keys or queries (heads, n, D) as they would be at position `at` instead of at `positions` (n,)."""
        if self.rope is None:
            return x
        raw = self.rope.rotate(x[None], positions[None], inverse=True)
        return self.rope.rotate(raw, torch.full_like(positions, at)[None])[0].to(x.dtype)


class BlockRetrieval:
    """The blocks of one layer's sequences; see `Focus`."""

    truncatable = False

    def __init__(self, lookup: BlockLookup, known: PerSequence[Blocks] | None = None) -> None:
        self._lookup = lookup
        self._known: PerSequence[Blocks] = PerSequence() if known is None else known

    def attend(
        self,
        sequence: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_pos: Tensor,
        budget: int,
        shape: AttentionShape,
        rope: RotaryEmbedding | None,
    ) -> tuple[Tensor, Tensor]:
        """See `Focus.attend`: the budget is that of the sequence until its next pass of many tokens."""
        old = self._known.get(sequence)
        none = Blocks(budget, q.new_zeros(0, len(q), q.shape[-1], dtype=wide(q.dtype)), q.new_zeros(len(q), 0).float())
        self._known[sequence] = (old or none)._replace(budget=budget)
        return self._attend(sequence, q, q_pos, lambda at: (k[:, at], v[:, at]), shape, rope)

    def decode(
        self,
        table: PageTable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_pos: Tensor,
        shape: AttentionShape,
        rope: RotaryEmbedding | None,
    ) -> tuple[Tensor, Tensor]:
        """See `Focus.decode`. Sequences one by one: each reads only what it attends to."""
        arrays, slots = table.pool.arrays, table.pool.slots
        counts = (q_pos >= 0).int().repeat_interleave(table.n_kv_heads)
        rows, values = k.flatten(0, 1)[:, None], v.flatten(0, 1)[:, None]
        index = torch.zeros_like(counts)[:, None]
        positions = q_pos.repeat_interleave(table.n_kv_heads)[:, None]
        ops.write(table.regions, EntryRows(table.lens, counts, index, rows, values, positions))
        table.lens += counts
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
        for sequence in np.flatnonzero(q_pos.cpu().numpy() >= 0).tolist():
            pages = table.pages[table.rows(sequence)]

            def fetch(at: Tensor, pages: Tensor = pages) -> tuple[Tensor, Tensor]:
                ids = pages[:, at // slots].long() * slots + at % slots
                return rows_at(arrays.keys, ids), rows_at(arrays.values, ids)

            own, at = q[sequence][:, None], q_pos[sequence : sequence + 1]
            found = self._attend(sequence, own, at, fetch, shape, rope)
            out[sequence], lse[sequence] = found[0][:, 0], found[1][:, 0]
        return out, lse

    def tensors(self, sequence: int) -> dict[str, Tensor]:
        """See `Focus.tensors`."""
        known = self._known[sequence]
        return {"budget": torch.tensor(known.budget), "means": known.means, "scores": known.scores}

    def adopt(self, stored: dict[str, Tensor]) -> None:
        """See `Focus.adopt`."""
        self._known[0] = Blocks(int(stored["budget"]), stored["means"], stored["scores"])

    def copy(self, sequences: list[int] | None = None) -> BlockRetrieval:
        """See `Focus.copy`."""
        return BlockRetrieval(self._lookup, self._known.copy(sequences))

    def join(self, other: BlockRetrieval, n_seq: int) -> None:
        """See `Focus.join`."""
        self._known.join(other._known, n_seq)

    # ------------------------------------------------------------------ attention

    def _attend(
        self, sequence: int, q: Tensor, q_pos: Tensor, fetch: Fetch, shape: AttentionShape, rope: RotaryEmbedding | None
    ) -> tuple[Tensor, Tensor]:
        budget = self._known[sequence].budget
        now = Passing(fetch, shape, rope, budget, self._lookup.protect.local(budget))
        step = self._lookup.together
        asked = [
            self._ask(sequence, now, q[:, begin : begin + step].to(wide(q.dtype)), q_pos[begin : begin + step].long())
            for begin in range(0, q.shape[1], step)
        ]
        return torch.cat([out for out, _ in asked], 1).to(q.dtype), torch.cat([lse for _, lse in asked], 1).float()

    def _ask(self, sequence: int, now: Passing, q: Tensor, q_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (Hq, rows, D) that look up one set of blocks; then the blocks that their pass has filled."""
        blocks = self._known[sequence]
        first, last = int(q_pos[0]), int(q_pos[-1])
        far_q = now.place(q, q_pos, now.local - 1)
        far = self._far_positions(blocks, far_q.mean(1), now, last, q.device)
        far_k, far_v = (t.to(q.dtype) for t in now.fetch(far))
        if self._lookup.far == "true":
            far_q = q
        else:
            far_k = now.place(far_k, far, 0)
        begin = self._lookup.protect.sinks + len(blocks.means) * self._lookup.protect.block
        scores = torch.nn.functional.pad(blocks.scores, (0, max(last + 1 - begin, 0) - blocks.scores.shape[1]))
        outs, norms = [], []
        for start in range(0, last + 1 - first, BLOCK):
            rows = slice(start, start + BLOCK)
            out, lse, near, received = self._rows(now, q[:, rows], far_q[:, rows], q_pos[rows], far, far_k, far_v)
            outs.append(out)
            norms.append(lse)
            counted = near >= begin
            scores.index_add_(1, near[counted] - begin, received[:, counted])
        self._known[sequence] = self._fill(blocks._replace(scores=scores), now, begin, last + 1)
        return torch.cat(outs, 1), torch.cat(norms, 1)

    def _far_positions(self, blocks: Blocks, asking: Tensor, now: Passing, last: int, device: torch.device) -> Tensor:
        """Ascending: sinks, looked-up blocks and what fills no block yet, as far as the query at `last` sees no more.

        asking: (Hq, D), the mean of the queries. Block b counts sum_h <q_h, mean_bh>; ties go to the older one.
        """
        sinks, size = self._lookup.protect.sinks, self._lookup.protect.block
        worth = torch.einsum("hd,bhd->b", asking, blocks.means)
        most = self._lookup.protect.blocks(now.budget)
        chosen = worth.argsort(descending=True, stable=True)[:most].sort().values
        within = torch.arange(size if len(chosen) else 0, device=device)  # a block may be longer than any text
        inside = (sinks + chosen[:, None] * size + within).flatten()
        rest = torch.arange(sinks + len(blocks.means) * size, max(last + 1, sinks), device=device)
        places = torch.cat([torch.arange(min(sinks, last + 1), device=device), inside, rest])
        return places[places <= (last - now.local if last >= now.budget else -1)]

    def _rows(
        self, now: Passing, q: Tensor, far_q: Tensor, q_pos: Tensor, far: Tensor, far_k: Tensor, far_v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Out and lse of a few queries, the positions near them, and the local attention that these received."""
        first, last, shape = int(q_pos[0]), int(q_pos[-1]), now.shape
        whole = first < now.budget  # all that such a query could see fits, so nothing is far from it
        near = torch.arange(0 if whole else max(first - now.local + 1, 0), last + 1, device=q.device)
        near_k, near_v = (t.to(q.dtype) for t in now.fetch(near))
        local = q_pos[:, None] - near < now.local
        fits = (q_pos < now.budget)[:, None]
        visible = torch.cat([(q_pos[:, None] - far >= now.local) & ~fits, (near <= q_pos[:, None]) & (local | fits)], 1)
        heads = len(near_k)
        pairs = ((far_q, far_k), (q, near_k))
        logits = [a.view(heads, -1, *a.shape[1:]) @ b[:, None].transpose(-1, -2) * shape.scale for a, b in pairs]
        sink = None if shape.sink_logits is None else shape.sink_logits.to(q.dtype).view(heads, -1, 1, 1)
        p, lse = softmax_with_sink(soft_cap(torch.cat(logits, -1), shape.softcap), visible, sink)
        out = (p @ torch.cat([far_v, near_v], 1)[:, None]).flatten(0, 1)
        received = p[..., len(far) :].masked_fill(~local, 0).sum(2)
        return out, lse.flatten(0, 1), near, received.flatten(0, 1).float()

    # ------------------------------------------------------------------ blocks

    def _fill(self, blocks: Blocks, now: Passing, begin: int, seen: int) -> Blocks:
        """Make blocks of the entries from `begin` on that no later query will see among its local ones."""
        size, few = self._lookup.protect.block, self._lookup.representatives
        n = max((seen - now.local - begin) // size, 0)
        if not n:
            return blocks
        places = torch.arange(begin, begin + n * size, device=blocks.scores.device)
        keys, _ = now.fetch(places)
        raw = now.place(keys.to(blocks.means.dtype), places, 0).view(len(keys), n, size, -1)
        scores = blocks.scores[:, : n * size].reshape(len(raw), -1, n, size)
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., :few, None]
        wider = raw[:, None].expand(-1, scores.shape[1], -1, -1, -1)
        means = wider.gather(3, best.expand(*best.shape[:-1], raw.shape[-1])).mean(3).flatten(0, 1)  # (Hq, n, D)
        return Blocks(blocks.budget, torch.cat([blocks.means, means.transpose(0, 1)]), blocks.scores[:, n * size :])
