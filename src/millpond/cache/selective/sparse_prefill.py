"""Sparse attention of a prompt: only the patterns of its heads are computed (MInference)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.rope_protocol import RotaryEmbedding
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.policy.needs import BLOCK, HeadPrompt, Pattern, PromptPatterns


class SparsePrefill:
    """The patterns of one layer; nothing of a sequence is remembered. See `Focus`."""

    truncatable = True

    def __init__(self, patterns: PromptPatterns, layer: int) -> None:
        self._patterns = patterns
        self._layer = layer

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
        """See `Focus.attend`: head by head, in blocks of rows."""
        patterns = self._patterns.patterns(self._layer, len(q))
        if all(pattern.covers(k.shape[1]) for pattern in patterns):
            past = torch.arange(k.shape[1] - q.shape[1], dtype=torch.int32, device=q.device)[None]
            out, lse, _ = ops.prefill(PrefillArgs(q, k, v, q_pos, shape, past if past.shape[1] else None))
            return out, lse
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        lse = torch.empty(q.shape[:2], device=q.device)
        for head, pattern in enumerate(patterns):
            sink = None if shape.sink_logits is None else shape.sink_logits[head : head + 1]
            one, own = replace(shape, sink_logits=sink), head * len(k) // len(q)
            _attend_head(q[head], k[own], v[own], pattern, one, out[head], lse[head])
        return out, lse

    def decode(
        self,
        table: PageTable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_pos: Tensor,
        shape: AttentionShape,
        rope: RotaryEmbedding | None,
    ) -> None:
        """See `Focus.decode`: everything is attended to."""

    def tensors(self, sequence: int) -> dict[str, Tensor]:
        """See `Focus.tensors`: there are none."""
        return {}

    def adopt(self, stored: dict[str, Tensor]) -> None:
        """See `Focus.adopt`: there is nothing to hold."""

    def copy(self, sequences: list[int] | None = None) -> SparsePrefill:
        """See `Focus.copy`: there is nothing to copy."""
        return self

    def join(self, other: SparsePrefill, n_seq: int) -> None:
        """See `Focus.join`: there is nothing to take over."""


def _attend_head(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, shape: AttentionShape, out: Tensor, lse: Tensor
) -> None:
    """Write out (Q, value_dim) and lse (Q,) of one head from q (Q, D), k (N, D) and v (N, value_dim).

    Each block of rows attends to the entries that it reads as if no others were stored; its own are always among
    them. Blocks of patterns with a width are no higher than that, so that no row hides one of its own block.
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
        found = ops.prefill(PrefillArgs(*some, replace(shape, window=width), places[None] if len(past) else None))
        out[rows], lse[rows] = found.out[0], found.lse[0]
