"""Attention of a prompt's queries to flagged entries and to their newest ones (Attention-Gate)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from millpond.cache.types import PromptChunk, by_position
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.policy.view import columns_of

#: Most rows of queries of one call of the kernel.
ROWS = 64


def attend_flagged(
    chunk: PromptChunk, visible: Tensor, band: int, whole: int, shape: AttentionShape
) -> tuple[Tensor, Tensor]:
    """Attend from new queries to the newest entries and, at any distance, to visible ones.

    a_ij = m_ij exp(s_ij) / sum_j' m_ij' exp(s_ij'), where m_ij is 1 if i - j < band or j is visible, else 0. Visible
    entries are gathered by head and read with the newest ones. Where nothing is hidden, it is the plain attention to
    the last bit.

    Args:
        chunk: New tokens, and the entries that they attend to.
        visible: (H, N) bool, entries that are seen at any distance.
        band: Newest positions that a query sees, its own among them; at least 1.
        whole: First queries that see everything.
        shape: Settings of the attention; a window of its own hides visible entries too.

    Returns:
        out (Hq, Q, value_dim), lse (Hq, Q) float32.
    """
    n = len(chunk.q_pos)
    whole = min(whole, n)
    if whole < n and _hides(chunk, visible, band, shape):
        rest = _banded(chunk, visible, band, whole, shape)
        if not whole:
            return rest
        first = _plain(chunk, 0, whole, shape)
        return torch.cat([first[0], rest[0]], 1), torch.cat([first[1], rest[1]], 1)
    return _plain(chunk, 0, n, shape)


def _hides(chunk: PromptChunk, visible: Tensor, band: int, shape: AttentionShape) -> bool:
    """Whether any entry is hidden from the last query that would see it otherwise."""
    positions = chunk.entries.positions
    far = (positions >= 0) & (positions <= chunk.q_pos[-1] - band)
    return band < (shape.window or band + 1) and bool((far & ~visible).any())


def _plain(chunk: PromptChunk, begin: int, end: int, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Attend from queries begin..end to all entries that are not newer."""
    n = len(chunk.q_pos)
    stop = chunk.entries.positions.shape[1] - n + end
    past = chunk.entries.positions[:, : stop - end + begin]
    keys, values = chunk.entries.keys[:, :stop], chunk.entries.values[:, :stop]
    before = past.contiguous() if past.shape[1] else None
    out, lse, _ = ops.prefill(PrefillArgs(chunk.q[:, begin:end], keys, values, chunk.q_pos[begin:end], shape, before))
    return out, lse


def _banded(chunk: PromptChunk, visible: Tensor, band: int, begin: int, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Attend from the queries behind the first `begin`, in blocks of rows.

    The kernel sees a window of `band` positions. A block no higher than that hides none of its own entries, and visible
    entries before it count as near: as the position of its first row, or as far before as the layer's window says.
    """
    entries, q_pos = chunk.entries, chunk.q_pos
    n, step, own = len(q_pos), min(ROWS, band), replace(shape, window=band)
    far = torch.where(visible & (entries.positions <= q_pos[-1] - band), entries.positions, -1)
    order = by_position(far)[:, : int((far >= 0).sum(1).max())]
    far, far_k, far_v = far.gather(1, order), columns_of(entries.keys, order), columns_of(entries.values, order)
    near = _newest(chunk, visible, band, begin)
    starts = q_pos[begin::step]
    counts = ((far >= 0) & (far <= (starts - band)[:, None, None])).sum(-1).amax(1).tolist()
    outs, norms = [], []
    for number, (place, count) in enumerate(zip(starts.tolist(), counts, strict=True)):
        rows = slice(begin + number * step, min(begin + (number + 1) * step, n))
        last = near.n_past + rows.start
        first = last - band + 1 if rows.start >= band else 0
        new = slice(first, near.n_past + rows.stop)
        beside = near.positions[:, first:last]
        places = torch.cat([far[:, :count].masked_fill(far[:, :count] > place - band, -1), beside], 1)
        seen = torch.cat([places[:, :count] >= 0, near.visible[:, first:last] & (beside > place - band)], 1)
        as_near = (places + (shape.window - band)).clamp(max=place) if shape.window else torch.full_like(places, place)
        past = torch.where(seen, as_near, places)
        keys = torch.cat([far_k[:, :count], near.keys[:, new]], 1)
        values = torch.cat([far_v[:, :count], near.values[:, new]], 1)
        before = past if past.shape[1] else None
        out, lse, _ = ops.prefill(PrefillArgs(chunk.q[:, rows], keys, values, q_pos[rows], own, before))
        outs.append(out)
        norms.append(lse)
    return torch.cat(outs, 1), torch.cat(norms, 1)


class _Newest(NamedTuple):
    """Entries that are among the newest of any query of a chunk, which come last."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    visible: Tensor
    n_past: int  #: columns before the chunk's


def _newest(chunk: PromptChunk, visible: Tensor, band: int, begin: int) -> _Newest:
    """Return the newest entries for the queries behind the first `begin`."""
    entries, n = chunk.entries, len(chunk.q_pos)
    n_past = entries.positions.shape[1] - n
    near = (entries.positions[:, :n_past] > chunk.q_pos[begin] - band).any(0)
    if bool(near.all()):
        return _Newest(entries.keys, entries.values, entries.positions, visible, n_past)
    past = torch.nonzero(near).flatten()
    columns = torch.cat([past, torch.arange(n_past, n_past + n, device=past.device)])
    keys, values, positions = (t[:, columns] for t in entries[:3])
    return _Newest(keys, values, positions, visible[:, columns], len(past))
