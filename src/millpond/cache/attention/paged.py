"""Attention of one layer over its pages: of a prompt, of one token per sequence, and of recorded queries for a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from millpond.cache.attention.aged import decode_aged
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.shared_prefix import SharedPrefixRuns
from millpond.cache.rope_protocol import RotaryEmbedding
from millpond.cache.state.sequence_state import SequenceState
from millpond.cache.types import Entries, PromptChunk
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, DecodeArgs, PageRegions, PrefillArgs, StepRegions, WindowSignalArgs
from millpond.kernels.cuda_graphs import RecordedDecode
from millpond.kernels.decode_rules import KEEP_ALL, DecodeRule, Reduce


class PagedAttention:
    """The attention of one layer, to what is stored or as far as its `Focus` looks.

    Attributes:
        index: of the layer.
        shape: what it does besides softmax(q k / sqrt d), as the last pass said.
        rope: how the layer rotates queries, for scores that undo it; None: not at all. Set by the model integration.
        outputs: see `View.outputs`. Set by the model integration.
        recorded: runs steps as recorded graphs; None: each is launched. Set by the model integration.
        shares_runs: a step may read what several sequences begin with once for all, which adds in another order.
    """

    def __init__(self, index: int, companions: SequenceState) -> None:
        self.index = index
        self.shape = AttentionShape(1.0)
        self.rope: RotaryEmbedding | None = None
        self.outputs: Callable[[], Tensor] | None = None
        self.shares_runs = True
        self.recorded: RecordedDecode | None = None
        self._companions = companions

    def value_dim(self, v: Tensor) -> int:
        """Numbers per output head."""
        return v.shape[-1]

    def chunk(
        self, chunk: PromptChunk, reduce: Reduce | None, decay: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attention of many queries over stored and new entries, with its column sums: see `ops.prefill`."""
        sequence, q, q_pos, found, budget = chunk
        focus = self._companions.focus
        if focus is not None and not self.shape.window:
            return *focus.attend(sequence, q, found.keys, found.values, q_pos, budget(), self.shape, self.rope), None
        n_past = found.positions.shape[1] - len(q_pos)
        past, masses = (None if t is None or not n_past else t[:, :n_past] for t in (found.positions, found.log_masses))
        return ops.prefill(PrefillArgs(q, found.keys, found.values, q_pos, self.shape, past, masses, reduce, decay))

    def step(
        self, table: PageTable, rule: DecodeRule, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend, score, evict, store: `ops.decode`. Returns (S, Hq, value_dim) and the log-sum-exp (S, Hq)."""
        focus = self._companions.focus
        if focus is not None and not self.shape.window:
            found = focus.decode(table, q, k, v, q_pos, self.shape, self.rope)
            if found is not None:
                return found
        if table.aged is not None:
            return decode_aged(table, table.aged, rule, self.shape, q, k, v, q_pos)
        runs = self.runs(table, rule, self.shape)
        if runs is not None:
            return self._two_phases(table, runs, q, k, v, q_pos)
        args = DecodeArgs(q, k, v, table.step_regions(rule, self.shape, q_pos))
        out, lse, _ = ops.decode(args) if self.recorded is None else self.recorded.decode(args)
        return out, lse

    def runs(self, table: PageTable, rule: DecodeRule, shape: AttentionShape) -> SharedPrefixRuns | None:
        """What sequences begin with together, where a step reads it once for all of them."""
        may = self.shares_runs and table.sealed is None and rule == KEEP_ALL and not shape.window
        return table.shared_runs() if may else None

    def _two_phases(
        self, table: PageTable, runs: SharedPrefixRuns, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A step where nothing leaves and nothing is scored: what is a sequence's own, then what it shares."""
        lens = table.lens - runs.taken
        own = PageRegions(table.pool.arrays, runs.own, lens)
        regions = StepRegions(own, table.capacities, table.recent, q_pos, KEEP_ALL, self.shape)
        out, lse, _ = ops.decode(DecodeArgs(q, k, v, regions))
        table.lens.copy_(lens + runs.taken)
        out = runs.attend(q, out.contiguous(), lse, self.shape)
        idle = (q_pos < 0)[:, None]
        return out.masked_fill_(idle[..., None], 0), lse.masked_fill_(idle, -torch.inf)

    def look_back(self, sequence: int, q: Tensor, q_pos: Tensor, found: Entries, reduce: Reduce) -> Tensor:
        """(H, N) float32: the attention of earlier queries q (Hq, w, key_dim) at q_pos (w,): `ops.window_signal`."""
        args = WindowSignalArgs(q, found.keys, q_pos, found.positions, self.shape, reduce, found.log_masses)
        return ops.window_signal(args)

    def keys(self, sequence: int, found: Entries) -> Tensor:
        """(H, N, key_dim): the keys that queries meet."""
        return found.keys

    def contents(self, table: PageTable, found: Entries, part: Literal["keys", "values"]) -> Tensor:
        """(H, N, dim): the keys or the values of candidates of a table, for a score that reads them."""
        basis, stored = table.basis, found.keys if part == "keys" else found.values
        if basis is None:
            return stored
        return basis.keys_back(stored) if part == "keys" else basis.values(stored)
