"""Passes of many tokens through one layer: prompts, chunks of prompts, and later turns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

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


class PartialSpan(Protocol):
    """The next `length` tokens of one sequence."""

    @property
    def length(self) -> int:
        """Tokens of the run."""
        ...

    @property
    def rows(self) -> Tensor:
        """(R,) int64 on the host, ascending: which of them are computed."""
        ...

    def complete(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (Hkv, length, key_dim) and values (Hkv, length, value_dim) of all tokens, keys after RoPE.

        k, v: (Hkv, R, dim), those of the computed tokens.
        """
        ...

    def observe(self, layer: int, q: Tensor, keys: Tensor, positions: Tensor, shape: AttentionShape) -> None:
        """See the attention of a layer: queries q (Hq, R, key_dim) over keys (Hkv, N, key_dim) at positions (Hkv, N).

        They come as they are stored: rotated by a Hadamard matrix where the codec does so.
        """
        ...


class NewTokens(NamedTuple):
    """New tokens of one sequence: q (Hq, Q, D), k (Hkv, Q, D), v (Hkv, Q, V) at positions (Q,), and their scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    scores: Tensor | None  #: (Hkv, Q) float32 that are stored with the entries; None: zero

    def part(self, begin: int, end: int) -> NewTokens:
        """Those of some columns."""
        q, k, v, positions, scores = self
        return NewTokens(
            q[:, begin:end],
            k[:, begin:end],
            v[:, begin:end],
            positions[begin:end],
            None if scores is None else scores[:, begin:end],
        )


@dataclass(frozen=True, slots=True)
class PromptPass:
    """The multi-token passes of one layer.

    Attributes:
        policy: what is kept. The others are the layer's own parts.
    """

    policy: Policy
    attention: PagedAttention
    planner: Planner
    sequence_state: SequenceState
    decode_step: DecodeStep

    def token_by_token(
        self, table: PageTable, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan, columns: int
    ) -> Tensor:
        """A pass whose tokens are decoded one after another. Arguments and result: as for `read`."""
        for sequence in np.flatnonzero(~span.decoding & (span.after > span.before)).tolist():
            self.planner.set_budget(table, sequence, self.planner.budget(table, sequence, int(span.after[sequence])))
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
        """A pass of many tokens. q: (S, Hq, Q, D), k: (S, Hkv, Q, D), v: (S, Hkv, Q, V) -> (S, Hq, Q, value_dim).

        Args:
            columns: that the layer has seen before. waits: the plan of the prompt comes later than this pass.
            probe: observes the pass, whose tokens are then not stored.
            scores: (S, Hkv, Q) float32 that are stored with the new entries; None: zero.
        """
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
                tokens = NewTokens(q_own, k_own, v_own, positions, given)
                out[sequence, :, own] = self._read_one(table, sequence, tokens, waits, probe)
        return out

    def read_partial(
        self, table: PageTable, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan, part: PartialSpan
    ) -> Tensor:
        """Tokens of one sequence of which only some have queries: q (Hq, R, D), k (Hkv, Q, D), v (Hkv, Q, V).

        All Q entries are stored, and their plan waits. Returns (Hq, R, value_dim).
        """
        positions = span.positions(0)
        q_pos = positions[part.rows.to(positions.device)]
        found = read_write.join(read_write.read(table, 0), k, v, positions)
        part.observe(self.attention.index, q, found.keys, found.positions, self.attention.shape)
        out = attend_scattered(q, found.keys, found.values, q_pos, found.positions, self.attention.shape)
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
        """One decoding step of the sequences in `decoding` (S,) bool, whose only token may lie in any column."""
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
        """Many tokens of one sequence -> (Hq, Q, value_dim)."""
        if probe is not None or self.policy.prefill != "chunks":
            return self._read_piece(table, sequence, tokens, waits, probe)
        n, seen = len(tokens.positions), int(tokens.positions[-1]) + 1
        ends = [*range(self.policy.chunk - (seen - n) % self.policy.chunk, n, self.policy.chunk), n]
        outs = []
        for begin, end in pairwise([0, *ends]):
            full = (seen - n + end) % self.policy.chunk == 0
            until = seen if full and (waits or end < n) else 0
            outs.append(self._read_piece(table, sequence, tokens.part(begin, end), waits, None, until))
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
        """Tokens that attend to what is stored and to each other; until: see `Planner.add_chunk`."""
        q, k, v, q_pos, scores = tokens
        if self.sequence_state.rolling is not None:
            q, k = self.sequence_state.rolling.prefill(table, sequence, q, k, q_pos)
        if table.quantized is not None and probe is None:
            table.quantized.collect_statistics(sequence, q, k)
        past = read_write.read(table, sequence)
        columns = None if probe is not None else self.sequence_state.columns.pop(sequence, None)
        if columns is not None:  # the pages are others', and so are the scores in them
            past = past._replace(scores=columns)
        found = read_write.join(past, k, v, q_pos, scores)
        chunk = PromptChunk(sequence, q, q_pos, found, lambda: self.planner.budget(table, sequence, int(q_pos[-1]) + 1))
        reduce = REDUCE[self.policy.reduce] if self.policy.observes_all else None
        out, lse, sums = self.attention.chunk(chunk, reduce, self.policy.decay)
        if probe is not None:
            met = self.attention.keys(sequence, found)
            positions = found.positions.expand(len(met), -1)
            probe.look(sequence, q, lse, q_pos, met, positions, self.attention.shape, found.log_masses)
        elif self.policy.keeps_all and not self.attention.shape.window:
            read_write.keep_all(table, sequence, k, v, q_pos, found, last=not waits)
        else:
            self.planner.add_chunk(table, chunk, lse, sums, defer=waits, until=until)
        return out
