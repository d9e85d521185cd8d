"""Which entries of a sequence become codes: the oldest ones behind the sinks, in whole pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from millpond.cache.pages.quantized_regions import Ints
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.types import by_position
from millpond.codec.spec import WHOLE, Codec
from millpond.kernels.transfers import on_device


def newest(codec: Codec, held: Ints) -> Ints:
    """Return how many of the newest of `held` entries stay in the tiers before `codec`.

    `held` has any shape. See `Codec.newest`.
    """
    n_newest: Ints = (codec.residual + held.astype(np.int64) * codec.share // WHOLE).astype(np.int32)
    return n_newest


def n_codes(quantized: QuantizedStore, loose: Ints, held: Ints) -> Ints:
    """Return how many of `loose` plain entries of each head are quantized now.

    held: All entries of each head. Both are (H,).
    """
    codec, page = quantized.codec, quantized.slots
    more: Ints = (loose - codec.sinks - newest(codec, held)).clip(min=0) // page * page
    return more


def oldest(quantized: QuantizedStore, positions: Tensor, loose: Tensor, held: Ints) -> Tensor:
    """Return which `loose` entries are quantized now, (H, N) bool.

    The first and the newest of `held` (H,) are left out.
    """
    codec, page = quantized.codec, quantized.slots
    stay = torch.from_numpy(newest(codec, held)).to(loose.device)
    more = (loose.sum(1) - codec.sinks - stay).clamp(min=0) // page * page
    order = by_position(torch.where(loose, positions, -1))
    sinks = (loose & (positions < codec.sinks)).sum(1)
    column = torch.arange(order.shape[1], device=order.device)
    chosen = (column >= sinks[:, None]) & (column < (sinks + more)[:, None])
    return torch.zeros_like(loose).scatter_(1, order, chosen)


def split(order: Tensor, positions: Tensor, n_plain: Ints, more: Ints, sinks: int) -> tuple[Tensor, Tensor]:
    """Return columns of the `more` oldest of n_plain entries of each head, and of the others.

    Sinks are among the others. `more` and n_plain are (H,).

    order: Columns (H, N) in the order of `positions` (H, N), -1 last.
    """
    width, most, rest = order.shape[1], int(more.max(initial=0)), int((n_plain - more).max(initial=0))
    if not most:
        return order[:, :0], order[:, :rest]
    if not sinks and (more == most).all():
        return order[:, :most], order[:, most : most + rest]
    after = on_device(np.minimum(np.arange(rest) + more[:, None], width - 1).astype(np.int64), order.device)
    if not sinks:
        return order[:, :most], order.gather(1, after)
    first = ((positions >= 0) & (positions < sinks)).sum(1, keepdim=True).clamp(max=sinks)
    column = torch.arange(max(most, rest), device=order.device)
    codes = order.gather(1, column[:most] + first)
    return codes, order.gather(1, torch.where(column[:rest] < first, column[:rest], after))


def split_columns(
    quantized: QuantizedStore, columns: Tensor, counts: Ints, *, seal: bool = True
) -> tuple[tuple[Tensor, Tensor], tuple[Ints, Ints]]:
    """Return which of a prompt's entries are quantized at its end, and which are not.

    Args:
        quantized: Empty store of the codes.
        columns: (R, n) columns of `complete` candidates, ascending.
        counts: (R,) how many of each row stay.
        seal: Whether to quantize any.

    Returns:
        The columns of both, (R, n) int64, and how many they are of each row, (R,).
    """
    more = n_codes(quantized, counts, counts) if seal else np.zeros_like(counts)
    both = split(columns.long(), _positions_at(columns, counts), counts, more, quantized.codec.sinks)
    return both, (more, counts - more)


def _positions_at(columns: Tensor, counts: Ints) -> Tensor:
    """Return the positions (H, n) of columns (H, n) of `complete` candidates.

    They are -1 after the first counts (H,) of each row.
    """
    if (counts == columns.shape[1]).all():
        return columns
    there = torch.arange(columns.shape[1], device=columns.device) < on_device(counts, columns.device)[:, None]
    return torch.where(there, columns, -1)


def counts_of(chosen: Sequence[Tensor]) -> list[Ints]:
    """Return how many entries of each head are chosen, (H,) of each (H, N) bool, on the host."""
    counts: list[Ints] = list(torch.stack([one.sum(1) for one in chosen]).cpu().numpy().astype(np.int32))
    return counts
