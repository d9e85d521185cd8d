"""Tiers by age: the oldest entries of a tier pass into the next one, a page at a time.

How many are due depends on how many entries a head holds, and on how many lie in the next tier and those behind it, not
on when it is looked at: so how a text was split into passes changes no code.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import Ints, QuantizedStore
from millpond.cache.types import by_position
from millpond.codec.spec import WHOLE, Codec
from millpond.kernels.args import joined

#: Beyond all positions: what lies in the next tier already goes before what comes from above.
FAR = 2**30


def newest(codec: Codec, held: Ints) -> Ints:
    """How many of the newest of `held` entries, of any shape, stay in the tiers before `codec`, see `Codec.newest`."""
    found: Ints = (codec.residual + held.astype(np.int64) * codec.share // WHOLE).astype(np.int32)
    return found


def due(table: PageTable, upper: QuantizedStore, lower: QuantizedStore, more: Ints | int = 0) -> Ints:
    """(n_seq, n_kv_heads) entries of `upper` that should lie in `lower`, the tier behind it.

    more: entries that may come into `upper` before.
    """
    held, parts = table.entries(), table.packed_parts
    below = sum((part.live for part in parts[parts.index(lower) :]), np.zeros_like(held))
    found: Ints = np.minimum(held - newest(lower.codec, held) - below, upper.live + more)
    return found


def pass_down(table: PageTable, active: np.ndarray) -> None:
    """Let entries of the sequences that are `active` (S,) bool pass into the tiers that they are old enough for.

    Raises:
        PoolFullError: the pool is full; what has not passed stays in the tier where it was.
    """
    for upper, lower in pairwise(table.packed_parts):
        over = due(table, upper, lower)
        for sequence in np.flatnonzero(active & (over >= lower.slots).any(1)).tolist():
            _pass(upper, lower, sequence, over[sequence].clip(min=0))


def _pass(upper: QuantizedStore, lower: QuantizedStore, sequence: int, over: Ints) -> None:
    """Encode as many of the oldest `over` (H,) entries of one tier as fill pages of the next.

    With them goes what survives in pages of the next tier that are at least half dead, where both together fill pages.
    """
    rows, slots = upper.rows(sequence), lower.slots
    sparse = lower.sparse(rows)
    again = lower.pages_of(rows, sparse)
    stays = (again.positions >= 0).sum(1).cpu().numpy()
    cut = (over + stays) // slots * slots < stays  # what survives there would not all find a place
    if cut.any():
        sparse[cut] = False
        again = lower.pages_of(rows, sparse)
        stays = (again.positions >= 0).sum(1).cpu().numpy()
    count = torch.from_numpy((over + stays) // slots * slots).to(again.positions.device)
    found = joined([again, upper.read(sequence)])
    n_again = again.positions.shape[1]
    age = found.positions.clone()
    age[:, n_again:] += torch.where(age[:, n_again:] >= 0, FAR, 0)
    order = by_position(age)
    lower.write(sequence, count, order[:, : int(count.max())], found)
    chosen = torch.arange(order.shape[1], device=order.device) < count[:, None]
    moved = torch.zeros_like(chosen).scatter_(1, order, chosen)
    lower.drop_pages(rows, sparse)
    upper.mark_evicted(rows, moved[:, n_again:])
    upper.drop_pages(rows, upper.sparse(rows, whole=True))
