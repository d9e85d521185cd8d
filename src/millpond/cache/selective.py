"""Selective attention: everything is stored, and each query reads part of it (InfLLM, MInference)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.entries import read_write
from millpond.cache.entries.compaction import rows_at
from millpond.cache.far_blocks import BlockFormat, FarBlocks, Place, fetched, place_of
from millpond.cache.pages.page_table import PageTable
from millpond.cache.types import PerSequence, RotaryEmbedding
from millpond.codec.spec import Codec
from millpond.errors import PoolFullError
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, DecodeArgs, EntryRows, PrefillArgs
from millpond.kernels.eager.softmax import soft_cap, softmax_with_sink, wide
from millpond.policy.needs import BLOCK, BlockLookup, HeadPrompt, Needs, Pattern, PromptPatterns

#: Rows of queries whose logits are held at a time.
MEMORY_BLOCK = 64

#: Reads keys (H, n, key_dim) and values (H, n, value_dim) at positions (n,).
Fetch = Callable[[Tensor], tuple[Tensor, Tensor]]


class Blocks(NamedTuple):
    """Blocks of one sequence; replaced, never written to."""

    budget: int
    means: Tensor  #: (n, Hq, key_dim), the representative key of each full block and query head, before RoPE
    scores: Tensor  #: (Hq, m) float32, local attention received by the newest entries, those in no block and no sink
    far: FarBlocks | None = None  #: the first blocks, which have left the pool; None: none have


class Passing(NamedTuple):
    """One pass of one sequence, in the wide dtype."""

    fetch: Fetch
    shape: AttentionShape
    rotary: RotaryEmbedding | None
    budget: int
    local: int

    def place(self, x: Tensor, positions: Tensor, at: int) -> Tensor:
        """Return keys or queries x (heads, n, D) moved from `positions` (n,) to position `at`."""
        if self.rotary is None:
            return x
        raw = self.rotary.rotate(x[None], positions[None], inverse=True)
        return self.rotary.rotate(raw, torch.full_like(positions, at)[None])[0].to(x.dtype)


class BlockRetrieval:
    """The blocks of one layer's sequences; see `SelectiveAttention`.

    Attributes:
        codec: Number format of blocks, which then lie outside of the pool; None: as the model made them.
    """

    truncatable = False

    def __init__(
        self, lookup: BlockLookup, known: PerSequence[Blocks] | None = None, codec: Codec | None = None
    ) -> None:
        self._lookup = lookup
        self.codec = codec
        self._known: PerSequence[Blocks] = PerSequence() if known is None else known

    def attend(
        self, sequence: int, args: PrefillArgs, budget: int, rotary: RotaryEmbedding | None
    ) -> tuple[Tensor, Tensor]:
        """Attend as `SelectiveAttention.attend`.

        The budget is that of the sequence until its next pass of many tokens.
        """
        q, old = args.q, self._known.get(sequence)
        none = Blocks(budget, q.new_zeros(0, len(q), q.shape[-1], dtype=wide(q.dtype)), q.new_zeros(len(q), 0).float())
        self._known[sequence] = (old or none)._replace(budget=budget)
        fetch = self._fetch(sequence, lambda at: (args.k[:, at], args.v[:, at]))
        return self._attend(sequence, q, args.q_pos, fetch, args.shape, rotary)

    def _fetch(self, sequence: int, resident: Fetch) -> Fetch:
        """Return a reader by position, given one by index among the entries in the pool."""
        far, sinks = self._known[sequence].far, self._lookup.protect.sinks
        return resident if far is None else partial(fetched, sinks=sinks, far=far, resident=resident)

    def takes_codec(self, codec: Codec) -> bool:
        """Store blocks in a number format; True."""
        self.codec = codec
        return True

    def move_out(self, table: PageTable, sequence: int) -> None:
        """Move blocks that are complete out of the pool.

        It is called after a pass of a sequence has stored its entries.

        Where pages that others hold leave no room for copies of those that stay, they wait for the next pass.

        Raises:
            DataError: the disk cannot be written.
            NumericsError: a number that the number format cannot hold.
        """
        place = place_of(self._lookup.offload, self.codec, table.pool.arrays.device)
        blocks = self._known.get(sequence)
        if place is None or blocks is None:
            return
        size, sinks, dims = self._lookup.protect.block, self._lookup.protect.sinks, table.pool.arrays
        far = blocks.far or FarBlocks(BlockFormat(place, size, self.codec), (dims.key_dim, dims.value_dim))
        n = len(blocks.means) - far.n
        if not n:
            return
        entries = read_write.read(table, sequence)
        leaving = slice(sinks, sinks + n * size)
        more = far.with_more(*(t[:, leaving].reshape(len(t), n, size, -1) for t in (entries.keys, entries.values)))
        gone = torch.zeros_like(entries.positions, dtype=torch.bool)
        gone[:, leaving] = True
        try:
            read_write.drop(table, sequence, entries, gone)
        except PoolFullError:
            return
        self._known[sequence] = blocks._replace(far=more)

    def entries_outside(self, n_seq: int) -> npt.NDArray[np.int32]:
        """Return the entries of each sequence outside of the pool, per KV head, (n_seq,)."""
        counts = np.zeros(n_seq, dtype=np.int32)
        for sequence, blocks in self._known.items():
            counts[sequence] = 0 if blocks.far is None else blocks.far.n * blocks.far.format.size
        return counts

    @property
    def bytes_outside(self) -> int:
        """Bytes of the blocks outside of the pool; those that sequences share count once."""
        far = {id(blocks.far): blocks.far for blocks in self._known.values() if blocks.far is not None}
        return sum(blocks.nbytes for blocks in far.values())

    def decode(self, table: PageTable, args: DecodeArgs, rotary: RotaryEmbedding | None) -> tuple[Tensor, Tensor]:
        """Decode as `SelectiveAttention.decode`: each sequence reads only its selection."""
        q, k, v, q_pos = args.q, args.k_new, args.v_new, args.regions.q_pos
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
            fetch_all = self._fetch(sequence, fetch)
            head_out, head_lse = self._attend(sequence, own, at, fetch_all, args.regions.shape, rotary)
            out[sequence], lse[sequence] = head_out[:, 0], head_lse[:, 0]
        return out, lse

    def tensors(self, sequence: int) -> dict[str, Tensor]:
        """See `SelectiveAttention.tensors`."""
        known = self._known[sequence]
        far = {} if known.far is None else {f"far_{n}": part for n, part in enumerate(known.far.whole())}
        if known.far is not None:
            far["far_shape"] = torch.tensor([known.far.n, known.far.format.size, *known.far.dims])
        return {"budget": torch.tensor(known.budget), "means": known.means, "scores": known.scores, **far}

    def adopt(self, stored: dict[str, Tensor]) -> None:
        """See `SelectiveAttention.adopt`."""
        far = None
        if "far_shape" in stored:
            place: Place = "disk" if self._lookup.offload == "disk" else "host"
            _, size, key_dim, value_dim = stored["far_shape"].tolist()
            names = ("far_0",) if self.codec is not None else ("far_0", "far_1")
            form = BlockFormat(place, self._lookup.protect.block, self.codec)
            far = FarBlocks(form, (key_dim, value_dim)).adopted(tuple(stored[name] for name in names), size)
        self._known[0] = Blocks(int(stored["budget"]), stored["means"], stored["scores"], far)

    def copy(self, sequences: list[int] | None = None) -> BlockRetrieval:
        """See `SelectiveAttention.copy`."""
        return BlockRetrieval(self._lookup, self._known.copy(sequences), self.codec)

    def join(self, other: BlockRetrieval, n_seq: int) -> None:
        """See `SelectiveAttention.join`."""
        self._known.join(other._known, n_seq)

    # ------------------------------------------------------------------ attention

    def _attend(
        self,
        sequence: int,
        q: Tensor,
        q_pos: Tensor,
        fetch: Fetch,
        shape: AttentionShape,
        rotary: RotaryEmbedding | None,
    ) -> tuple[Tensor, Tensor]:
        budget = self._known[sequence].budget
        now = Passing(fetch, shape, rotary, budget, self._lookup.protect.local(budget))
        step = self._lookup.together
        asked = [
            self._ask(sequence, now, q[:, begin : begin + step].to(wide(q.dtype)), q_pos[begin : begin + step].long())
            for begin in range(0, q.shape[1], step)
        ]
        return torch.cat([out for out, _ in asked], 1).to(q.dtype), torch.cat([lse for _, lse in asked], 1).float()

    def _ask(self, sequence: int, now: Passing, q: Tensor, q_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from queries (Hq, rows, D) that share their blocks; then make new blocks."""
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
        for start in range(0, last + 1 - first, MEMORY_BLOCK):
            rows = slice(start, start + MEMORY_BLOCK)
            out, lse, near, received = self._rows(now, q[:, rows], far_q[:, rows], q_pos[rows], far, far_k, far_v)
            outs.append(out)
            norms.append(lse)
            counted = near >= begin
            scores.index_add_(1, near[counted] - begin, received[:, counted])
        self._known[sequence] = self._fill(blocks._replace(scores=scores), now, begin, last + 1)
        return torch.cat(outs, 1), torch.cat(norms, 1)

    def _far_positions(self, blocks: Blocks, asking: Tensor, now: Passing, last: int, device: torch.device) -> Tensor:
        """Return positions of sinks, looked-up blocks and the rest of no block yet, ascending.

        The query at `last` sees all of them. asking: (Hq, D), the mean of the queries. Block b counts
        sum_h <q_h, mean_bh>; ties go to the older one.
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
        """Return out and lse of a few queries, positions near them, and their local attention."""
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
        """Make blocks of entries from `begin` on that no later query will see as local ones."""
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
        joined = torch.cat([blocks.means, means.transpose(0, 1)])
        return blocks._replace(means=joined, scores=blocks.scores[:, n * size :])


class SparsePrefill:
    """The patterns of one layer; it keeps no state. See `SelectiveAttention`."""

    truncatable = True

    def __init__(self, patterns: PromptPatterns, layer: int) -> None:
        self._patterns = patterns
        self._layer = layer

    def attend(
        self, sequence: int, args: PrefillArgs, budget: int, rotary: RotaryEmbedding | None
    ) -> tuple[Tensor, Tensor]:
        """Attend as `SelectiveAttention.attend`: head by head, in blocks of rows."""
        q, k, v, shape = args.q, args.k, args.v, args.shape
        patterns = self._patterns.patterns(self._layer, len(q))
        if all(pattern.covers(k.shape[1]) for pattern in patterns):
            past = torch.arange(k.shape[1] - q.shape[1], dtype=torch.int32, device=q.device)[None]
            out, lse, _ = ops.prefill(replace(args, past_pos=past if past.shape[1] else None))
            return out, lse
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        lse = torch.empty(q.shape[:2], device=q.device)
        for head, pattern in enumerate(patterns):
            sink = None if shape.sink_logits is None else shape.sink_logits[head : head + 1]
            one, own = replace(shape, sink_logits=sink), head * len(k) // len(q)
            _attend_head(q[head], k[own], v[own], pattern, one, out[head], lse[head])
        return out, lse

    def decode(self, table: PageTable, args: DecodeArgs, rotary: RotaryEmbedding | None) -> None:
        """Return None: a step attends to everything."""

    def takes_codec(self, codec: Codec) -> bool:
        """Leave codes to the pool; False."""
        return False

    def move_out(self, table: PageTable, sequence: int) -> None:
        """Do nothing: entries stay in the pool."""

    def entries_outside(self, n_seq: int) -> npt.NDArray[np.int32]:
        """Return zeros."""
        return np.zeros(n_seq, dtype=np.int32)

    @property
    def bytes_outside(self) -> int:
        """Zero."""
        return 0

    def tensors(self, sequence: int) -> dict[str, Tensor]:
        """Return no tensors."""
        return {}

    def adopt(self, stored: dict[str, Tensor]) -> None:
        """Do nothing: there is no state."""

    def copy(self, sequences: list[int] | None = None) -> SparsePrefill:
        """Return itself: there is no state."""
        return self

    def join(self, other: SparsePrefill, n_seq: int) -> None:
        """Do nothing: there is no state."""


def _attend_head(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, shape: AttentionShape, out: Tensor, lse: Tensor
) -> None:
    """Write out (Q, value_dim) and lse (Q,) of one head, from q (Q, D), k (N, D), v (N, dim).

    Each block of rows attends to the entries that it reads as if no others were stored; its own are always among them.
    Blocks of patterns with a width are no higher than that, so that no row hides one of its own block.
    """
    look, n = pattern.look(HeadPrompt(q, k, shape.scale, shape.softcap, shape.sink_logits)), len(k)
    first, width = pattern.near or (0, 0)
    for begin in range(n - len(q), n, step := min(BLOCK, width or BLOCK)):
        end = min(begin + step, n)
        rows = slice(begin - n + len(q), end - n + len(q))
        columns = look(begin, end)
        past = columns[: len(columns) - (end - begin)].int()
        places = torch.where(past < first, begin, past)  # the first ones count as near
        q_pos = torch.arange(begin, end, dtype=torch.int32, device=q.device)
        some = q[None, rows], k[None, columns], v[None, columns], q_pos
        result = ops.prefill(PrefillArgs(*some, replace(shape, window=width), places[None] if len(past) else None))
        out[rows], lse[rows] = result.out[0], result.lse[0]


class SelectiveAttention(Protocol):
    """The attention of one full layer to part of its entries, and its state of each sequence.

    The layer stores everything: the entry at position p of a sequence is in slot p of every head, less the entries
    before it that `move_out` has moved out of the pool.
    """

    @property
    def truncatable(self) -> bool:
        """Whether the newest entries can be cut off without going back to a copy."""
        ...

    def attend(
        self, sequence: int, args: PrefillArgs, budget: int, rotary: RotaryEmbedding | None
    ) -> tuple[Tensor, Tensor]:
        """Attend from new queries to stored and new entries, of all positions in order.

        Args:
            sequence: Sequence in the table.
            args: Queries, the entries of all positions 0 .. N - 1, of which those of the queries are the last, and the
                shape of the layer.
            budget: Entries per head that a query may attend to.
            rotary: Rotary embedding of queries and keys; None for none.

        Returns:
            out (Hq, Q, value_dim); lse (Hq, Q) float32.
        """
        ...

    def decode(
        self, table: PageTable, args: DecodeArgs, rotary: RotaryEmbedding | None
    ) -> tuple[Tensor, Tensor] | None:
        """Store the new entries and attend, as in a step; None to attend to everything."""
        ...

    def takes_codec(self, codec: Codec) -> bool:
        """Take over the number format of the layer, if only entries outside of the pool have it."""
        ...

    def move_out(self, table: PageTable, sequence: int) -> None:
        """Move entries out of the pool after a pass of a sequence, if some may leave."""
        ...

    def entries_outside(self, n_seq: int) -> npt.NDArray[np.int32]:
        """Return the entries of each sequence outside of the pool, per KV head, (n_seq,)."""
        ...

    @property
    def bytes_outside(self) -> int:
        """Bytes of entries outside of the pool."""
        ...

    def tensors(self, sequence: int) -> dict[str, Tensor]:
        """Return all state of one sequence, for `adopt`."""
        ...

    def adopt(self, stored: dict[str, Tensor]) -> None:
        """Hold one sequence, of which `tensors` returned this elsewhere.

        Raises:
            KeyError: a tensor is missing.
            DataError: blocks outside of the pool have another form.
        """
        ...

    def copy(self, sequences: list[int] | None = None) -> SelectiveAttention:
        """Return an independent copy of the given sequences in this order, or of all."""
        ...

    def join(self, other: Any, n_seq: int) -> None:
        """Take the sequences of `other`, of the same layer, after the `n_seq` of this batch."""
        ...


def selective_attention_of(needs: Needs, layer: int) -> SelectiveAttention | None:
    """Return the selective attention of a full layer for a policy with these needs, or None."""
    if needs.block_lookup is not None:
        return BlockRetrieval(needs.block_lookup)
    return None if needs.prompt_patterns is None else SparsePrefill(needs.prompt_patterns, layer)
