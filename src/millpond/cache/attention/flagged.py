"""Attention of a prompt's queries to flagged entries and to their newest ones (Attention-Gate)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from millpond.cache.types import PromptChunk
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.kernels.eager.softmax import lse_merge
from millpond.kernels.scattered_rows import probabilities
from millpond.policy.view import columns_of


def attend_flagged(
    chunk: PromptChunk, visible: Tensor, band: int, whole: int, shape: AttentionShape
) -> tuple[Tensor, Tensor]:
    """Attend from new queries to the newest entries and, at any distance, to visible ones.

    a_ij = m_ij exp(s_ij) / sum_j' m_ij' exp(s_ij'), where m_ij is 1 if i - j < band or j is visible, else 0. The newest
    entries of all queries are read in the kernel of prompts, with a window; the others are gathered by head, and both
    merge by their log-sum-exp. Where nothing is hidden, it is the plain attention to the last bit.

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
    """Attend from the queries behind the first `begin` to the newest entries, and to the visible ones before them."""
    near = _plain(_newest(chunk, band, begin), begin, len(chunk.q_pos), replace(shape, window=band))
    entries, q_pos = chunk.entries, chunk.q_pos[begin:] - band
    far = visible & (entries.positions <= q_pos[-1])
    if shape.window:
        far &= entries.positions > q_pos[0] + band - shape.window
    count = int(far.sum(1).max())
    if not count:
        return near
    order = (~far).to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
    positions = torch.where(columns_of(far, order), columns_of(entries.positions, order), -1)
    keys, values = columns_of(entries.keys, order), columns_of(entries.values, order)
    # seen from `band` positions earlier the visible entries are those that are not newer; the sink has been counted
    earlier = replace(shape, window=max(shape.window - band, 0), sink_logits=None)
    outs, norms = [], []
    for p, lse in probabilities(chunk.q[:, begin:], keys, q_pos, positions, earlier):
        outs.append((p @ values.to(p.dtype)[:, None]).flatten(0, 1))
        norms.append(lse.flatten(0, 1).float())
    out, lse = lse_merge(near[0].to(outs[0].dtype), near[1], torch.cat(outs, 1), torch.cat(norms, 1))
    return out.to(near[0].dtype), lse


def _newest(chunk: PromptChunk, band: int, begin: int) -> PromptChunk:
    """Return the chunk with those stored entries alone that any query behind the first `begin` sees as new ones."""
    entries, n = chunk.entries, len(chunk.q_pos)
    n_past = entries.positions.shape[1] - n
    positions = entries.positions[:, :n_past]
    near = torch.nonzero((positions > chunk.q_pos[begin] - band).any(0)).flatten()
    if len(near) == n_past:
        return chunk
    columns = torch.cat([near, torch.arange(n_past, n_past + n, device=near.device)])
    keys, values, places, scores = (t[:, columns] for t in entries[:4])
    return chunk._replace(entries=entries._replace(keys=keys, values=values, positions=places, scores=scores))
