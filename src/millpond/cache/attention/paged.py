"""Attention of one layer over its pages: of a prompt, of one token per sequence, and over entries in age bands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from millpond.cache.pages.aged_store import AgedStore
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.shared_prefix import SharedCodeRuns, SharedPrefixRuns
from millpond.cache.state.attention_samples import LayerSamples
from millpond.cache.state.sequence_state import SequenceState
from millpond.cache.types import Entries, PromptChunk, RotaryEmbedding
from millpond.kernels import ops
from millpond.kernels.args import (
    AttentionShape,
    DecodeArgs,
    PageRegions,
    PrefillArgs,
    SharedDecodeArgs,
    StepRegions,
    WindowSignalArgs,
)
from millpond.kernels.cuda_graphs import RecordedDecode
from millpond.kernels.decode_rules import KEEP_ALL, DecodeRule, Reduce, Signal
from millpond.kernels.eager.attention import window_probabilities
from millpond.kernels.eager.softmax import INF, reduce_group, soft_cap


class _Met(NamedTuple):
    """Result of queries in one tier."""

    part: QuantizedStore
    logits: Tensor  #: (R, group, W) float32, -inf where a query sees nothing
    values: Tensor  #: (R, W, value_dim) float32


def decode_aged(
    table: PageTable,
    quantized: AgedStore,
    rule: DecodeRule,
    shape: AttentionShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend to all tiers, score them, and store the new entries; nothing is evicted.

    Args:
        table: Table of the layer.
        quantized: Tiers of its quantized entries.
        rule: Rule with `Evict.NEVER`.
        shape: Scale, soft cap and window of the layer.
        q: Queries (S, Hq, key_dim).
        k: Keys (S, Hkv, key_dim).
        v: Values (S, Hkv, value_dim).
        q_pos: Positions (S,) int32.

    Returns:
        (S, Hq, value_dim) and the log-sum-exp (S, Hq).
    """
    n_seq, n_heads = q.shape[:2]
    met = [_meet(part, q, q_pos, shape) for part in quantized.middle]
    logits = torch.cat([one.logits for one in met], -1)
    lse = torch.logsumexp(logits, -1).reshape(n_seq, n_heads)  # -inf where there is nothing
    args = DecodeArgs(q.float(), k, v, table.step_regions(rule, shape, q_pos))
    if rule.signal is Signal.NONE:
        rest, rest_lse, _ = ops.decode(args)
        total = torch.logaddexp(rest_lse, lse)
        share = _weight(rest_lse, total)
    else:
        rest, total = _with_sinks(args, lse)
        share = torch.ones_like(total)
    seen = total.masked_fill(total == -INF, 0.0).reshape(logits.shape[:2])[..., None]
    p = torch.exp(logits - seen)
    begin, out = 0, rest.float() * share[..., None]
    for one in met:
        own = p[..., begin : begin + one.logits.shape[-1]]
        begin += one.logits.shape[-1]
        out = out + (own @ one.values).reshape(out.shape)
        _score(one.part, rule, own, q_pos)
    return out.to(q.dtype), total


def _meet(part: QuantizedStore, q: Tensor, q_pos: Tensor, shape: AttentionShape) -> _Met:
    """Return the logits of one tier, dequantized."""
    width = int(part.lens.max(initial=0))
    keys, values, positions, _, masses = ops.read_packed(part.regions(), width, part.head_dim)
    n_regions, pos = len(keys), q_pos.repeat_interleave(part.n_kv_heads)[:, None]
    logits = q.float().reshape(n_regions, -1, q.shape[-1]) @ keys.transpose(1, 2) * shape.scale
    logits = soft_cap(logits, shape.softcap)
    if masses is not None:
        logits = logits + masses[:, None]
    visible = (positions >= 0) & (pos >= 0)
    if shape.window:
        visible &= pos - positions < shape.window
    return _Met(part, logits.masked_fill(~visible[:, None], -INF), values.float())


def _weight(part: Tensor, total: Tensor) -> Tensor:
    """Return the share of a denominator, both as logarithms; 0 if there is nothing at all."""
    return torch.exp(part - total.masked_fill(total == -INF, 0.0))


def _with_sinks(args: DecodeArgs, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Run `ops.decode` with the denominators (S, Hq) of entries that it does not read.

    A kernel takes those of one sequence.
    """
    r, n_heads = args.regions, args.k_new.shape[1]
    assert r.packed is not None, "the last tier is packed"
    outs, totals = [], []
    for s in range(len(args.q)):
        one, rows = slice(s, s + 1), slice(s * n_heads, (s + 1) * n_heads)
        sink = lse[s] if r.shape.sink_logits is None else torch.logaddexp(lse[s], r.shape.sink_logits.float())
        plain = PageRegions(r.plain.pages, r.plain.table[rows], r.plain.lens[rows])
        regions = StepRegions(
            plain,
            r.caps[rows],
            r.recent[rows],
            r.q_pos[one],
            r.rule,
            replace(r.shape, sink_logits=sink.contiguous()),
            r.packed.part(rows),
        )
        out, total, _ = ops.decode(DecodeArgs(args.q[one], args.k_new[one], args.v_new[one], regions))
        outs.append(out)
        totals.append(total)
    return torch.cat(outs), torch.cat(totals)


def _score(part: QuantizedStore, rule: DecodeRule, p: Tensor, q_pos: Tensor) -> None:
    """Update accumulators of other entries as the decode kernel does; p: (R, group, W)."""
    if rule.signal is Signal.NONE or not p.shape[-1]:
        return
    rows = slice(0, len(part.lens))
    received, positions = reduce_group(p, rule.reduce, 1), part.positions(rows)
    if rule.signal is Signal.SUM:
        received = rule.decay * part.scores(rows) + received
    active = (q_pos >= 0).repeat_interleave(part.n_kv_heads)[:, None]
    part.rescore(rows, received, (positions >= 0) & active)


class PagedAttention:
    """Attention of one layer to stored entries, or to those that its selection chooses.

    Attributes:
        index: Index of the layer.
        shape: Scale, soft cap and window in the last pass.
        rotary: Rotary embedding of queries, for scores that undo it; None for none. Set by the model integration.
        outputs: Output maps, see `View.outputs`. Set by the model integration.
        recorded: Recorded graphs that run steps; None to launch each. Set by the model integration.
        samples: Samples of the attention of the prompt that is read, for a storage codec; None: none are taken.
        shares_runs: Whether a step may read common beginnings of sequences once for all, which adds in another order.
    """

    def __init__(self, index: int, sequence_state: SequenceState) -> None:
        self.index = index
        self.shape = AttentionShape(1.0)
        self.rotary: RotaryEmbedding | None = None
        self.outputs: Callable[[], Tensor] | None = None
        self.shares_runs = True
        self.recorded: RecordedDecode | None = None
        self.samples: LayerSamples | None = None
        self._sequence_state = sequence_state

    def output_norms(self) -> Tensor:
        """Return the norms of the rows of the output projection, (Hq, value_dim) float32.

        Raises:
            UnsupportedModelError: the model has no such linear map.
        """
        assert self.outputs is not None, "the cache of a model knows its output projections"
        norms: Tensor = torch.linalg.vector_norm(self.outputs(), dim=2, dtype=torch.float32)
        return norms

    def value_dim(self, v: Tensor) -> int:
        """Return the numbers per output head."""
        return v.shape[-1]

    def chunk(
        self, chunk: PromptChunk, reduce: Reduce | None, decay: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attend from many queries to stored and new entries, with column sums: see `ops.prefill`."""
        sequence, q, q_pos, _, entries, budget = chunk
        selective = self._sequence_state.selective
        if selective is not None and not self.shape.window:
            args = PrefillArgs(q, entries.keys, entries.values, q_pos, self.shape)
            return *selective.attend(sequence, args, budget(), self.rotary), None
        n_past = entries.positions.shape[1] - len(q_pos)
        past, masses = (
            None if t is None or not n_past else t[:, :n_past] for t in (entries.positions, entries.log_masses)
        )
        return ops.prefill(PrefillArgs(q, entries.keys, entries.values, q_pos, self.shape, past, masses, reduce, decay))

    def step(
        self, table: PageTable, rule: DecodeRule, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend, score, evict, store: `ops.decode`.

        Returns (S, Hq, value_dim) and the log-sum-exp (S, Hq).
        """
        selective = self._sequence_state.selective
        if selective is not None and not self.shape.window:
            args = DecodeArgs(q, k, v, table.step_regions(rule, self.shape, q_pos))
            attention = selective.decode(table, args, self.rotary)
            if attention is not None:
                return attention
        if table.aged is not None:
            return decode_aged(table, table.aged, rule, self.shape, q, k, v, q_pos)
        runs = self.runs(table, rule, self.shape)
        if runs is not None:
            return self._two_phases(table, runs, q, k, v, q_pos)
        args = DecodeArgs(q, k, v, table.step_regions(rule, self.shape, q_pos))
        out, lse, _ = ops.decode(args) if self.recorded is None else self.recorded.decode(args)
        return out, lse

    def runs(
        self, table: PageTable, rule: DecodeRule, shape: AttentionShape
    ) -> SharedPrefixRuns | SharedCodeRuns | None:
        """Return common beginnings of sequences, if a step reads them once for all.

        Of a table with codes they are those of the codes.
        """
        if not self.shares_runs or rule != KEEP_ALL or shape.window:
            return None
        if table.quantized is None:
            return table.shared_runs()
        return table.quantized.shared_runs() if isinstance(table.quantized, QuantizedStore) else None

    def _two_phases(
        self, table: PageTable, runs: SharedPrefixRuns | SharedCodeRuns, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run a step without eviction and scores, over a sequence's own entries and shared ones."""
        if isinstance(runs, SharedPrefixRuns):
            lens = table.lens - runs.shared_lens
            own = PageRegions(table.pool.arrays, runs.own_pages, lens)
            regions = StepRegions(own, table.capacities, table.recent, q_pos, KEEP_ALL, self.shape)
            result = ops.decode_shared(SharedDecodeArgs(DecodeArgs(q, k, v, regions), runs.shared))
            table.lens.copy_(lens + runs.shared_lens)
            return result
        regions = replace(table.step_regions(KEEP_ALL, self.shape, q_pos), packed=runs.own_regions)
        out, lse, _ = ops.decode(DecodeArgs(q, k, v, regions))
        out = runs.attend(q, out.contiguous(), lse, self.shape)
        idle = (q_pos < 0)[:, None]
        return out.masked_fill_(idle[..., None], 0), lse.masked_fill_(idle, -torch.inf)

    def look_back(self, sequence: int, q: Tensor, q_pos: Tensor, entries: Entries, reduce: Reduce) -> Tensor:
        """Return the attention of earlier queries, (H, N) float32: `ops.window_signal`.

        q: (Hq, w, key_dim) at q_pos (w,).
        """
        args = WindowSignalArgs(q, entries.keys, q_pos, entries.positions, self.shape, reduce, entries.log_masses)
        return ops.window_signal(args)

    def look_back_rows(self, sequence: int, q: Tensor, q_pos: Tensor, entries: Entries, head: int) -> Tensor:
        """Return attention of each earlier query, (group, w, N): `window_probabilities`.

        It is that to the entries of one KV head. q: (Hq, w, key_dim) at q_pos (w,).
        """
        keys, one = self.keys(sequence, entries), slice(head, head + 1)
        group, n_heads = len(q) // len(keys), len(keys)
        sinks, masses = self.shape.sink_logits, entries.log_masses
        own = slice(head * group, (head + 1) * group)
        shape = self.shape if sinks is None else replace(self.shape, sink_logits=sinks[own])
        return window_probabilities(
            WindowSignalArgs(
                q[own],
                keys[one],
                q_pos,
                entries.positions.expand(n_heads, -1)[one],
                shape,
                log_masses=None if masses is None else masses.expand(n_heads, -1)[one],
            )
        )[0]

    def keys(self, sequence: int, entries: Entries) -> Tensor:
        """Return the keys that queries meet, (H, N, key_dim)."""
        return entries.keys

    def contents(self, table: PageTable, entries: Entries, part: Literal["keys", "values"]) -> Tensor:
        """Return keys or values of candidates of a table, (H, N, dim), for a score of them."""
        basis, stored = table.basis, entries.keys if part == "keys" else entries.values
        if basis is None:
            return stored
        return basis.keys_back(stored) if part == "keys" else basis.values(stored)
