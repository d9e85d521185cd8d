"""Entries of one layer in a pass, kept until its end for later layers without keys of their own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from millpond.cache.entries import read_write
from millpond.cache.pages.page_table import PageTable
from millpond.cache.state.positions import ForwardSpan
from millpond.cache.types import Entries
from millpond.codec.basis import Basis
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, PrefillArgs


class _Part(NamedTuple):
    """Part of a pass, and the entries of its tokens: earlier ones per sequence, then new ones."""

    span: ForwardSpan
    met: list[Entries]
    basis: Basis | None


class SharedEntries:
    """Entries of one layer that other layers read in the running pass, before it evicts.

    So a layer that shares keys sees what their owner sees: entries that were evicted in earlier passes are gone for
    both, and both see for the last time what the owner evicts at the end of this pass.
    """

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def clear(self) -> None:
        """Forget the entries of a pass."""
        self._parts.clear()

    def collect(self, table: PageTable, k: Tensor, v: Tensor, span: ForwardSpan) -> None:
        """Keep the entries that the tokens of `span` attend to, before the owner stores them.

        Args:
            table: Table of the owner.
            k: New keys (S, Hkv, Q, key_dim), as they are stored in `table`.
            v: New values (S, Hkv, Q, value_dim).
            span: Positions of the pass.
        """
        met = []
        for sequence in range(table.n_seq):
            own = span.columns(sequence)
            k_own, v_own = k[sequence, :, own], v[sequence, :, own]
            met.append(read_write.join(read_write.read(table, sequence), k_own, v_own, span.positions(sequence)))
        self._parts.append(_Part(span, met, table.basis))

    def attend(self, q: Tensor, shape: AttentionShape) -> Tensor:
        """Return the attention of another layer's queries in the same pass.

        Args:
            q: Queries (S, Hq, Q, key_dim), after RoPE; if they are fewer than the tokens of the pass, of its last ones.
            shape: Scale, soft cap and window of the layer.

        Returns:
            (S, Hq, Q, value_dim); zero at pads.
        """
        length = sum(part.span.length for part in self._parts)
        begin, outs = length - q.shape[2], []
        for part in self._parts:
            n = part.span.length
            if begin < n:
                skip = max(begin, 0)
                outs.append(_attend(part, q[:, :, : n - skip], skip, shape))
                q = q[:, :, n - skip :]
            begin -= n
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def _attend(part: _Part, q: Tensor, skip: int, shape: AttentionShape) -> Tensor:
    """Return the attention of a part without its first `skip` columns, (S, Hq, n, value_dim)."""
    if part.basis is not None:
        q = part.basis.queries(q)
    out = q.new_zeros(*q.shape[:3], part.met[0].values.shape[-1])
    for sequence, entries in enumerate(part.met):
        columns = torch.arange(part.span.length, device=q.device)[part.span.columns(sequence)]
        asked = columns >= skip
        if not bool(asked.any()):
            continue
        here, positions = columns[asked] - skip, part.span.positions(sequence)[asked]
        n_past = entries.positions.shape[1] - len(positions)
        past, masses = (
            None if t is None or not n_past else t[:, :n_past] for t in (entries.positions, entries.log_masses)
        )
        args = PrefillArgs(q[sequence, :, here], entries.keys, entries.values, positions, shape, past, masses)
        out[sequence, :, here] = ops.prefill(args).out
    return out if part.basis is None else part.basis.values(out)
