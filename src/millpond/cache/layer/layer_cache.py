"""Cache of one layer: the one place where write, attend, score, plan and apply happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millpond.cache.attention.paged import PagedAttention
from millpond.cache.entries import quantize, read_write
from millpond.cache.layer.decode_step import DecodeStep, PendingStep
from millpond.cache.layer.prompt_pages import FindPool, PromptPages
from millpond.cache.pages.heap import give_back_after
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.cache.planning.planner import Planner
from millpond.cache.rope_protocol import RotaryEmbedding
from millpond.cache.state.positions import ForwardSpan, PositionTracker
from millpond.cache.state.reconstruction import ReconstructionProbe
from millpond.cache.state.sequence_state import LayerSnapshot, SequenceState
from millpond.cache.types import PromptChunk
from millpond.codec.rotate import rotate
from millpond.errors import CacheMismatchError
from millpond.kernels.args import AttentionShape, PaddedEntries
from millpond.policy.policy import REDUCE, Policy
from millpond.policy.scores.query_moments import QueryMoments
from millpond.policy.view import View


class LayerCache:
    """The cache of one attention layer for a batch of sequences.

    Args:
        index: of the layer.
        policy: what is kept.
        entries: `entries(table, sequence, seen)` -> budget in entries per KV head for a sequence of `seen` tokens.
        pool: where pages of a shape lie. reading: where those of a prompt lie until its plan; None: in the same pool.
        timeline: shared by all layers.
        between_chunks: plan at the end of every multi-token pass; else once, before the next single-token pass.
        rotation: how keys are rotated by position, for policies with cache-relative positions.
        sealed: `sealed(layer, n_seq, n_kv_heads, key_dim, value_dim, device)` -> where entries go as codes; None: they
            stay as they are.

    Attributes:
        columns: columns (pads included) that this layer has seen.
        peek: while set, passes of many tokens are looked at and not taken in.
        reading: while set, a prompt is read in parts: its plan waits, and a pass of one token belongs to it.
        companions: what is remembered of the sequences beside their entries.
        attention: how queries meet entries. planner: what stays.
    """

    _attention_type = PagedAttention  # a subclass may read elsewhere

    def __init__(
        self,
        index: int,
        policy: Policy,
        entries: Callable[[PageTable, int, int], int],
        pool: FindPool,
        timeline: PositionTracker,
        *,
        between_chunks: bool = True,
        rotation: RotaryEmbedding | None = None,
        sealed: Callable[[int, int, int, int, int, torch.device], QuantizedStore] | None = None,
        reading: FindPool | None = None,
    ) -> None:
        self.index = index
        self.policy = policy
        self.timeline = timeline
        self.columns = 0
        self.peek: ReconstructionProbe | None = None
        self.reading = False
        self.companions = SequenceState.of(policy, index, rotation)
        self.attention = self._attention_type(index, self.companions)
        self.planner = Planner(policy, entries, timeline, self.attention, self.companions)
        self._stepper = DecodeStep(index, policy, timeline, self.attention, self.planner, self.companions)
        self._pool = pool
        self._sealed = sealed
        self._between_chunks = between_chunks
        self._prompt = PromptPages(pool, None if policy.prefill == "greedy" else reading, self._waits)
        self._table: PageTable | None = None
        self._opened = False

    # ------------------------------------------------------------------ what others may ask

    @property
    def table(self) -> PageTable | None:
        """Pages and lengths; None before the first token."""
        return self._table

    @property
    def stored(self) -> np.ndarray:
        """(n_seq, n_kv_heads) entries held."""
        return self._table.entries() if self._table is not None else np.zeros((0, 0), dtype=np.int32)

    @property
    def pending(self) -> bool:
        """Whether there are entries that no plan has seen."""
        return bool(self.companions.pending) or (self._table is not None and self._table.unplanned)

    def read(self, sequence: int) -> PaddedEntries:
        """The entries of one sequence, one row per KV head, in the order of their positions, padded at the end."""
        table = self._require_table()
        found = read_write.in_order(read_write.read(table, sequence))
        if table.is_hadamard_rotated:
            found = found._replace(keys=rotate(found.keys), values=rotate(found.values))
        return found

    def measure(self, sequence: int, of: Callable[[View], float]) -> float:
        """A number `of` one sequence as a plan would see it now."""
        return self.planner.measure(self._require_table(), sequence, of)

    def moments(self, sequence: int) -> QueryMoments:
        """Sums over the queries of one sequence so far, for a policy that asks for them.

        Raises:
            CacheMismatchError: nothing was summed.
        """
        return self.planner.views.moments(sequence)

    def settle(self, found: ReconstructionProbe | None = None) -> None:
        """Plan now what waits for the end of the prompt, and seal what is to be; scores rise to what was `found`."""
        table = self._table = self.planner.run_deferred(self._require_table(), self._prompt, found)
        quantize.quantize_due(table, np.ones(table.n_seq, dtype=bool))

    # ------------------------------------------------------------------ the step

    def offer(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What a model goes on computing with, given the new entries that it hands in: here just these."""
        return k, v

    def accept(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The new entries for `attend`, given the keys and values that came of `offer`: here the same."""
        return k, v

    def forget(self) -> None:
        """Drop what was kept of the last pass only so that its tokens could be taken back: here nothing."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> Tensor:
        """Take in new tokens and return their attention over what is kept and themselves.

        Args:
            q: (B, Hq, Q, key_dim). k: (B, Hkv, Q, key_dim). v: (B, Hkv, Q, value_dim), keys after RoPE.
            mask: (B, >= Q) bool, newest columns last, False for pads; None: no pads. Pads are never stored.

        Returns:
            (B, Hq, Q, value_dim); zero at pads.

        Raises:
            PoolFullError, CacheMismatchError, BudgetError, NumericsError: see `millpond.errors`.
        """
        span = self.timeline.span(self.columns, q.shape[2], q.shape[0], mask, q.device)
        table = self._table if self._table is not None and self._opened else self.allocate(k, v, shape)
        self.attention.shape = shape
        turned = table.is_hadamard_rotated
        if turned:
            q, k, v = rotate(q), rotate(k), rotate(v)
        if self._decodes(span):
            out = self._newest(table, q[:, :, 0], k[:, :, 0], v[:, :, 0], span)[:, :, None]
        elif self.policy.prefill == "greedy":
            out = self._token_by_token(table, q, k, v, span)
        else:
            out = self._prefill(table, q, k, v, span)
        self.columns += span.length
        return rotate(out) if turned else out

    def attend_newest(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        """`attend` for one new token of every sequence, none a pad.

        Args:
            q: (S, Hq, key_dim). k: (S, Hkv, key_dim). v: (S, Hkv, value_dim), keys after RoPE.

        Returns:
            (S, Hq, value_dim).
        """
        span = self.timeline.span(self.columns, 1, q.shape[0], None, q.device)
        if self._table is None or not self._opened or self._table.is_hadamard_rotated or not self._decodes(span):
            return self.attend(q[:, :, None], k[:, :, None], v[:, :, None], None, shape)[:, :, 0]
        self.attention.shape = shape
        out = self._newest(self._table, q, k, v, span)
        self.columns += 1
        return out

    def is_fusable(self, n_seq: int, shape: AttentionShape) -> bool:
        """Whether `attend_newest` is `begin_step`, `ops.decode` and `end_step`, and nothing else."""
        table = self._table
        if table is None or not self._opened or self.pending:
            return False
        return self._decodes(self._newest_span(table, n_seq)) and self._stepper.plain(table, shape)

    def begin_step(self, n_seq: int, shape: AttentionShape) -> PendingStep:
        """Of a layer that `is_fusable`: one new token of every sequence, none a pad.

        Raises:
            PoolFullError: see `attend`; nothing was changed.
        """
        table, self.attention.shape = self._require_table(), shape
        span = self._newest_span(table, n_seq)
        return self._stepper.begin(table, span.token(0), span.device, span.q_pos)

    def end_step(self, step: PendingStep, lse: Tensor) -> None:
        """Behind `ops.decode`, whose log-sum-exp is `lse` (S, Hq).

        Raises:
            NumericsError: attention is NaN.
        """
        self._stepper.end(step, lse, self.columns)
        self.columns += 1

    def allocate(self, k: Tensor, v: Tensor, shape: AttentionShape, *, planned: bool = False) -> PageTable:
        """An empty table for entries like k (B, Hkv, any, key_dim) and v (B, Hkv, any, value_dim).

        planned: they come from a cache that has planned them.
        """
        pool = self._prompt.pool(k, v, planned=planned)
        assert pool.arrays.masses or not self.policy.mass_bias, "entries that merge with mass_bias have masses"
        sealed = None
        if self._sealed is not None:
            sealed = self._sealed(self.index, k.shape[0], k.shape[1], k.shape[-1], v.shape[-1], k.device)
            if shape.window and sealed.codec.tiered:
                sealed = None  # what a window hides needs no lower tier
        table = self._table = self._table or PageTable(pool, k.shape[0], k.shape[1])
        table.sealed = sealed
        self._opened = True
        self._stepper.open(shape.window, sealed is not None and sealed.codec.tiered)
        return table

    def _require_table(self) -> PageTable:
        if self._table is None:
            raise CacheMismatchError(f"layer {self.index} holds nothing yet: run the model first")
        return self._table

    # ------------------------------------------------------------------ decoding

    def _decodes(self, span: ForwardSpan) -> bool:
        """Whether a pass brings every sequence its next token, or a pad, behind a prompt that was read."""
        return span.length == 1 and span.begun and self.peek is None and not self.reading

    def _newest(self, table: PageTable, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan) -> Tensor:
        """A pass that decodes: q (S, Hq, D), k, v (S, Hkv, D) -> (S, Hq, value_dim)."""
        if self.pending:
            table = self._table = self.planner.run_deferred(table, self._prompt)
        return self._stepper.step(table, q, k, v, span.token(0), self.columns, span.q_pos)

    def _newest_span(self, table: PageTable, n_seq: int) -> ForwardSpan:
        """One more token of every sequence."""
        return self.timeline.span(self.columns, 1, n_seq, None, table.pool.arrays.device)

    def _token_by_token(self, table: PageTable, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan) -> Tensor:
        """A multi-token pass as if it had been decoded."""
        for sequence in np.flatnonzero(~span.decoding & (span.after > span.before)).tolist():
            self.planner.set_budget(table, sequence, self.planner.budget(table, sequence, int(span.after[sequence])))
            if table.sealed is not None:
                columns = span.columns(sequence)
                table.sealed.collect_statistics(sequence, q[sequence, :, columns], k[sequence, :, columns])
        steps = [
            self._stepper.step(table, q[..., i, :], k[..., i, :], v[..., i, :], span.token(i), self.columns)
            for i in range(span.length)
        ]
        return torch.stack(steps, 2)

    # ------------------------------------------------------------------ prefill

    def _waits(self) -> bool:
        """Whether the plan of a prompt comes later than the pass that brings it."""
        return self.reading or not self._between_chunks

    def _prefill(self, table: PageTable, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan) -> Tensor:
        give_back_after(q.nbytes if q.is_cpu else 0)
        if self.peek is None:
            table = self._table = self._prompt.begin(table, k.dtype)
        out = q.new_zeros(*q.shape[:3], self.attention.value_dim(v))
        # what has a single new token decodes, as it would outside this batch; in a prompt in chunks nothing tells
        decoding = np.zeros(table.n_seq, dtype=bool) if self._waits() else span.decoding
        if decoding.any():
            self._decode_some(table, q, k, v, span, decoding, out)
        for sequence in np.flatnonzero(~decoding).tolist():
            columns, positions = span.columns(sequence), span.positions(sequence)
            if len(positions):
                q_own, k_own, v_own = (t[sequence, :, columns] for t in (q, k, v))
                out[sequence, :, columns] = self._prefill_one(table, sequence, q_own, k_own, v_own, positions)
        return out

    def _decode_some(
        self, table: PageTable, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan, decoding: np.ndarray, out: Tensor
    ) -> None:
        """One decoding step of the sequences in `decoding` (S,) bool, whose only token may lie in any column."""
        rows = torch.arange(table.n_seq, device=q.device)
        columns = torch.from_numpy(span.first_columns()).to(q.device)
        q_own, k_own, v_own = (t[rows, :, columns] for t in (q, k, v))
        step = self._stepper.step(table, q_own, k_own, v_own, np.where(decoding, span.before, -1), self.columns)
        chosen = torch.from_numpy(decoding).to(q.device)
        out[rows[chosen], :, columns[chosen]] = step[chosen]

    def _prefill_one(self, table: PageTable, sequence: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor) -> Tensor:
        """Many tokens of one sequence. q: (Hq, Q, D), k, v: (Hkv, Q, D) -> (Hq, Q, value_dim)."""
        if self.companions.rolling is not None:
            q, k = self.companions.rolling.prefill(table, sequence, q, k, q_pos)
        if table.sealed is not None and self.peek is None:
            table.sealed.collect_statistics(sequence, q, k)
        found = read_write.join(read_write.read(table, sequence), k, v, q_pos)
        chunk = PromptChunk(sequence, q, q_pos, found, lambda: self.planner.budget(table, sequence, int(q_pos[-1]) + 1))
        reduce = REDUCE[self.policy.reduce] if self.policy.observes_all else None
        out, lse, sums = self.attention.chunk(chunk, reduce, self.policy.decay)
        if self.peek is not None:
            met = self.attention.keys(sequence, found)
            positions = found.positions.expand(len(met), -1)
            self.peek.look(sequence, q, lse, q_pos, met, positions, self.attention.shape, found.log_masses)
        elif self.policy.keeps_all and not self.attention.shape.window:
            read_write.keep_all(table, sequence, k, v, q_pos, found, last=not self._waits())
        else:
            self.planner.add_chunk(table, chunk, lse, sums, defer=self._waits())
        return out

    # ------------------------------------------------------------------ the batch, and going back

    def begin_with(self, table: PageTable, columns: int) -> None:
        """Begin with `columns` tokens of a prompt that were read before, which `table` holds; its plan comes later."""
        self._table, self.columns = table, columns
        if not self.policy.keeps_all:
            self.companions.pending[0] = columns

    def join(self, other: LayerCache) -> None:
        """Take over the sequences of `other`, a cache of the same layer and policy; it holds nothing afterwards.

        Pages move, none is copied. Both timelines must be joined as well.
        """
        table = other._require_table()
        if self._table is None:
            self._table, self.attention.shape, self._opened = table, other.attention.shape, True
            self._stepper.take_over(other._stepper)
            self.companions.become(other.companions)
        else:
            self.companions.join(other.companions, self._table.n_seq)
            self._table.join(table)
        other._table = None
        other.reset()

    def lend(self, sequences: list[int], to: LayerCache) -> None:
        """Let `to`, an empty cache of the same layer and policy, hold some of the sequences too; pages are shared."""
        to._table = self._require_table().fork()
        to._table.select(sequences)
        to.attention.shape, to._opened = self.attention.shape, True
        to._stepper.take_over(self._stepper)
        to.companions.become(self.companions.copy(sequences))

    def pages_for(self, n_tokens: int) -> int:
        """Pages that the next `n_tokens` of a prompt take; 0 for a layer that has read nothing."""
        whole = self.policy.observes_all or self.policy.prefill == "greedy"
        return 0 if self._table is None else self._table.pages_for(n_tokens, whole)

    def pages_for_step(self) -> dict[RefCountedPool[Any], int]:
        """Most pages that the next decoding step may take of each pool."""
        return {} if self._table is None else self._stepper.pages(self._table)

    def select(self, sequences: list[int]) -> None:
        """Become the given sequences, in this order (beams, batch selection, repetition)."""
        if self._table is not None:
            self._table.select(sequences)
            self.companions.become(self.companions.copy(sequences))

    @property
    def truncatable(self) -> bool:
        """Whether the newest entries can simply be cut off: nothing ever left."""
        follows = self.companions.focus is None or self.companions.focus.truncatable
        return self.policy.keeps_all and not self.attention.shape.window and follows

    def truncate(self, columns: int, tokens: np.ndarray) -> None:
        """Cut off the newest `columns`, which hold `tokens` (n_seq,) entries of every region of a sequence."""
        if self._table is not None:
            for sequence, lens in enumerate(self._table.lengths()):
                gone = tokens[sequence].astype(np.int32)
                if self._table.sealed is not None:
                    gone = gone - quantize.truncate(self._table.sealed, sequence, int(self.timeline.seen[sequence]))
                self._table.set_lengths(sequence, lens - gone)
            self.columns -= columns

    def fork(self) -> LayerSnapshot:
        """The state as it is now, to `restore` later or to `release`."""
        table = self._table.fork() if self._table is not None else None
        return LayerSnapshot(table, self.columns, self.companions.copy())

    def restore(self, state: LayerSnapshot) -> None:
        """Go back to a forked state, which is used up."""
        if self._table is not None:
            self._table.clear()
        self._table, state.table = state.table, None
        self.columns = state.columns
        self.companions.become(state.companions)

    def reset(self) -> None:
        """Give back every page and forget every token."""
        if self._table is not None:
            self._table.clear()
        self._table, self.columns, self._opened = None, 0, False
        self._stepper.reset()
        self.companions.become(self.companions.copy([]))
