"""Passes of many tokens through one layer: prompts, chunks of prompts, and later turns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from millpond.cache.attention.flagged import attend_flagged
from millpond.cache.attention.paged import PagedAttention
from millpond.cache.entries import read_write
from millpond.cache.layer.decode_step import DecodeStep
from millpond.cache.pages.page_table import PageTable
from millpond.cache.planning.planner import Planner
from millpond.cache.state.positions import ForwardSpan
from millpond.cache.state.reconstruction import ReconstructionProbe
from millpond.cache.state.sequence_state import SequenceState
from millpond.cache.types import PromptChunk
from millpond.kernels.args import AttentionShape
from millpond.kernels.scattered_rows import attend_scattered
from millpond.policy.policy import REDUCE, Policy
from millpond.policy.prompt_flags import PromptFlags
from millpond.tiers.free_memory import give_back_after


class PartialSpan(Protocol):
    """The next `length` tokens of one sequence, of which only some are computed."""

    @property
    def length(self) -> int:
        """Tokens of the span."""
        ...

    @property
    def rows(self) -> Tensor:
        """Indices (R,) int64 of the computed tokens, ascending, on the host."""
        ...

    def complete(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens, keys after RoPE.

        Args:
            layer: Index of the layer.
            k: Keys (Hkv, R, key_dim) of the computed tokens.
            v: Values (Hkv, R, value_dim) of these.

        Returns:
            Keys (Hkv, length, key_dim) and values (Hkv, length, value_dim).
        """
        ...

    def narrow(self, layer: int) -> tuple[PartialSpan, Tensor] | None:
        """Return the span with fewer computed tokens behind a layer; None: with the same.

        Returns:
            The span of the deeper layers, and which of today's `rows` are computed there: (n,) int64, ascending, on the
            host.
        """
        ...

    def observe(self, layer: int, q: Tensor, keys: Tensor, positions: Tensor, shape: AttentionShape) -> None:
        """Observe the attention of a layer.

        Queries are (Hq, R, key_dim), keys (Hkv, N, key_dim) at positions (Hkv, N). They are as stored: rotated by a
        Hadamard matrix if the codec does so.
        """
        ...


class NewTokens(NamedTuple):
    """New tokens of one sequence, and their scores.

    q is (Hq, Q, D), k (Hkv, Q, D) and v (Hkv, Q, V), at positions (Q,).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    first: int  #: the first of the positions, which are consecutive
    scores: Tensor | None  #: (Hkv, Q) float32 that are stored with the entries; None: zero

    def part(self, begin: int, end: int) -> NewTokens:
        """Return the tokens of some columns."""
        q, k, v, positions, first, scores = self
        return NewTokens(
            q[:, begin:end],
            k[:, begin:end],
            v[:, begin:end],
            positions[begin:end],
            first + begin,
            None if scores is None else scores[:, begin:end],
        )


@dataclass(frozen=True, slots=True)
class PromptPass:
    """The multi-token passes of one layer.

    Attributes:
        policy: Policy of the layer.
        attention: Attention of the layer.
        planner: Planner of the layer.
        sequence_state: State of the sequences.
        decode_step: Decoding steps of the layer.
    """

    policy: Policy
    attention: PagedAttention
    planner: Planner
    sequence_state: SequenceState
    decode_step: DecodeStep

    def read_greedily(
        self, table: PageTable, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan, columns: int
    ) -> Tensor:
        """Decode the tokens of a pass one after another; arguments and result as for `read`."""
        for sequence in np.flatnonzero(~span.decoding & (span.after > span.before)).tolist():
            self.planner.budgets.limit(
                table, sequence, self.planner.budgets.of(table, sequence, int(span.after[sequence]))
            )
            if table.quantized is not None:
                own = span.columns(sequence)
                table.quantized.collect_statistics(sequence, q[sequence, :, own], k[sequence, :, own])
        steps = [
            self.decode_step.step(table, q[..., i, :], k[..., i, :], v[..., i, :], span.token(i), columns)
            for i in range(span.length)
        ]
        return torch.stack(steps, 2)

    def read(
        self,
        table: PageTable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        span: ForwardSpan,
        columns: int,
        *,
        waits: bool,
        probe: ReconstructionProbe | None,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Read many tokens.

        Args:
            table: Table of the layer.
            q: Queries (S, Hq, Q, D).
            k: Keys (S, Hkv, Q, D).
            v: Values (S, Hkv, Q, V).
            span: Positions of the pass.
            columns: Columns that the layer has seen before.
            waits: Whether the plan of the prompt comes later than this pass.
            probe: Observer of the pass, whose tokens are then not stored.
            scores: Scores (S, Hkv, Q) float32 of the new entries; None for zero.

        Returns:
            (S, Hq, Q, value_dim).
        """
        give_back_after(q.nbytes if q.is_cpu else 0)
        out = q.new_zeros(*q.shape[:3], self.attention.value_dim(v))
        # what has a single new token decodes, as it would outside this batch; in a prompt in chunks nothing tells
        decoding = np.zeros(table.n_seq, dtype=bool) if waits else span.decoding
        if decoding.any():
            self._decode_some(table, q, k, v, span, columns, decoding, out, scores)
        for sequence in np.flatnonzero(~decoding).tolist():
            own, positions = span.columns(sequence), span.positions(sequence)
            if len(positions):
                q_own, k_own, v_own = (t[sequence, :, own] for t in (q, k, v))
                given = None if scores is None else scores[sequence, :, own]
                tokens = NewTokens(q_own, k_own, v_own, positions, int(span.before[sequence]), given)
                out[sequence, :, own] = self._read_one(table, sequence, tokens, waits, probe)
        return out

    def read_partial(
        self, table: PageTable, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan, part: PartialSpan
    ) -> Tensor:
        """Read tokens of one sequence of which only some have queries.

        q: (Hq, R, D), k: (Hkv, Q, D), v: (Hkv, Q, V) -> (Hq, R, value_dim). All Q entries are stored, and their plan
        waits.
        """
        positions = span.positions(0)
        q_pos = positions[part.rows.to(positions.device)]
        entries = read_write.join(read_write.read(table, 0), k, v, positions)
        part.observe(self.attention.index, q, entries.keys, entries.positions, self.attention.shape)
        out = attend_scattered(q, entries.keys, entries.values, q_pos, entries.positions, self.attention.shape)
        self.planner.add_partial(table, q, q_pos, k, v, positions)
        return out

    def _decode_some(
        self,
        table: PageTable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        span: ForwardSpan,
        columns: int,
        decoding: np.ndarray,
        out: Tensor,
        scores: Tensor | None,
    ) -> None:
        """Decode the only token, in any column, of the sequences in `decoding` (S,) bool."""
        rows = torch.arange(table.n_seq, device=q.device)
        first = torch.from_numpy(span.first_columns()).to(q.device)
        q_own, k_own, v_own = (t[rows, :, first] for t in (q, k, v))
        given = None if scores is None else scores[rows, :, first]
        positions = np.where(decoding, span.before, -1)
        step = self.decode_step.step(table, q_own, k_own, v_own, positions, columns, scores=given)
        chosen = torch.from_numpy(decoding).to(q.device)
        out[rows[chosen], :, first[chosen]] = step[chosen]

    def _read_one(
        self, table: PageTable, sequence: int, tokens: NewTokens, waits: bool, probe: ReconstructionProbe | None
    ) -> Tensor:
        """Read many tokens of one sequence -> (Hq, Q, value_dim)."""
        chunked = probe is None and self.policy.prefill == "chunks"
        n, chunk = len(tokens.positions), self.policy.chunk
        seen = tokens.first + n
        first, flags = chunk - (seen - n) % chunk, self.policy.needs.prompt_flags
        if flags is not None:  # as long as a later turn may be a short one, nothing leaves
            whole = flags.all_seen_until(self._turn(sequence, tokens.first)) - (seen - n)
            first += -(-max(whole - first, 0) // chunk) * chunk
        ends = range(first, n, chunk) if chunked else ()
        outs = []
        for begin, end in pairwise([0, *ends, n]):
            ends_chunk = chunked and (seen - n + end) % chunk == 0 and end >= first
            until = seen if ends_chunk and (waits or end < n) else 0
            outs.append(self._read_piece(table, sequence, tokens.part(begin, end), waits, probe, until))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _read_piece(
        self,
        table: PageTable,
        sequence: int,
        tokens: NewTokens,
        waits: bool,
        probe: ReconstructionProbe | None,
        until: int = 0,
    ) -> Tensor:
        """Read tokens that attend to stored entries and to each other, see `Planner.add_chunk`."""
        q, k, v, q_pos, first, scores = tokens
        seen = first + len(q_pos)
        if self.sequence_state.rolling is not None:
            q, k = self.sequence_state.rolling.prefill(table, sequence, q, k, q_pos)
        past = read_write.read(table, sequence, self.planner.held_if_complete(sequence, first))
        columns = None if probe is not None else self.sequence_state.columns.pop(sequence, None)
        if columns is not None:  # the pages are others', and so are the scores in them
            past = past._replace(scores=columns)
        entries = read_write.join(past, k, v, q_pos, scores)
        chunk = PromptChunk(sequence, q, q_pos, seen, entries, lambda: self.planner.budgets.of(table, sequence, seen))
        reduce = REDUCE[self.policy.reduce] if self.policy.observes_all else None
        flags = self.policy.needs.prompt_flags
        if flags is None or not flags.act_within(self.attention.shape.window):
            out, lse, sums = self.attention.chunk(chunk, reduce, self.policy.decay)
        else:
            out, lse = self._attend_flagged(chunk, flags)
            sums = None
        if self.attention.samples is not None and probe is None:
            self.attention.samples.observe(q, lse, entries.keys, self.attention.shape)
        if table.quantized is not None and probe is None:
            norms = self.attention.output_norms() if table.quantized.codec.prune_values else None
            table.quantized.collect_statistics(sequence, q, k, None if norms is None else out, norms)
        if probe is not None:
            met = self.attention.keys(sequence, entries)
            positions = entries.positions.expand(len(met), -1)
            probe.look(sequence, q, lse, q_pos, met, positions, self.attention.shape, entries.log_masses)
        elif self.policy.keeps_all and not self.attention.shape.window:
            read_write.keep_all(table, sequence, k, v, q_pos, entries, last=not waits)
            if self.sequence_state.selective is not None:
                self.sequence_state.selective.move_out(table, sequence)
        else:
            self.planner.add_chunk(table, chunk, lse, sums, defer=waits, until=until)
        return out

    def _turn(self, sequence: int, first: int) -> int:
        """Return the position at which the turn of new tokens begins.

        first: position of the first of them.
        """
        return self.sequence_state.turns[sequence] if sequence in self.sequence_state.pending else first

    def _attend_flagged(self, chunk: PromptChunk, flags: PromptFlags) -> tuple[Tensor, Tensor]:
        """Attend to what the flags let queries see -> (Hq, Q, value_dim), (Hq, Q)."""
        sequence, positions, first = chunk.sequence, chunk.entries.positions, chunk.seen - len(chunk.q_pos)
        turn = self._turn(sequence, first)
        visible = flags.visible(chunk.entries.scores, positions, first, turn)
        kept = self.planner.budgets.in_kept_spans(sequence, positions)
        if kept is not None:
            visible |= kept & (positions >= 0)
        whole = max(flags.all_seen_until(turn) - first, 0)
        return attend_flagged(chunk, visible, flags.band, whole, self.attention.shape)
