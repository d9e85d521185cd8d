"""Scores that new tokens are written with, from queries, keys and values before RoPE."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.cache.rope_protocol import RotaryEmbedding
from millpond.cache.state.positions import ForwardSpan
from millpond.policy.retaining.heads import RetainingHeads

#: Tokens whose rotation is undone at a time, so that a long prompt takes no copies of its queries and keys.
BLOCK = 1024


def entry_scores(
    heads: RetainingHeads, layer: int, rope: RotaryEmbedding | None, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan
) -> Tensor:
    """(S, Hkv, Q) float32: the scores of the new tokens of one pass; any number at pads.

    Args:
        rope: how the layer has rotated q (S, Hq, Q, key_dim) and k (S, Hkv, Q, key_dim); None: not at all.
        v: (S, Hkv, Q, value_dim).

    Raises:
        CacheMismatchError: the heads are of a model of another shape.
    """
    grid = None if rope is None else span.grid().clamp(min=0).long()
    found = []
    for begin in range(0, q.shape[2], BLOCK):
        part = slice(begin, begin + BLOCK)
        queries, keys = q[:, :, part], k[:, :, part]
        if rope is not None and grid is not None:
            both = rope.rotate(torch.cat([queries, keys], 1), grid[:, part], inverse=True)
            queries, keys = both[:, : q.shape[1]], both[:, q.shape[1] :]
        found.append(heads.scores(layer, queries, keys, v[:, :, part]))
    return found[0] if len(found) == 1 else torch.cat(found, -1)
