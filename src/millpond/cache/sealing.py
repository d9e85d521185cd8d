"""Sealing: which entries of a region become codes, and when.

The first tokens of a text (`codec.sinks`) and its newest entries (`codec.residual`) stay in plain pages. What lies
between them is sealed a page at a time, oldest first, so that how a text was split into passes changes no code. While
decoding, new entries gather in plain pages until another page is full.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millpond.cache.parts import Candidates, by_position
from millpond.cache.plain import hold
from millpond.cache.sealed import Sealed
from millpond.cache.table import RegionTable
from millpond.kernels import ops
from millpond.kernels.ops import Dense


def before(sealed: Sealed, sequence: int, plain: Candidates) -> Candidates:
    """All entries of a sequence: the sealed ones as numbers, slot by slot, then the plain ones."""
    return _behind(sealed.read(sequence), plain)._replace(n_sealed=sealed.width(sequence))


def place(table: RegionTable, sequence: int, found: Candidates, keep: Tensor, *, seal: bool) -> None:
    """Hold exactly the kept candidates (H, N), and with `seal` as many of them as codes as the format wants.

    Sealed entries that stay keep their codes, those that leave become tombstones; only what survives in a page that is
    at least half dead is encoded again. Candidates of which none was sealed (a merge made them) replace everything.
    """
    sealed = table.sealed
    assert sealed is not None
    n, rows = found.n_sealed, table.rows(sequence)
    loose = keep.clone()
    sparse = np.zeros((table.n_kv_heads, 0), dtype=bool)
    if n:
        here = found.positions[:, :n] >= 0
        sealed.bury(rows, here & ~keep[:, :n])
        stays = here & keep[:, :n]
        sealed.rescore(rows, found.scores[:, :n], stays & (found.scores[:, :n] != sealed.scores(rows)))
        sparse = sealed.sparse(rows)
        loose[:, :n] = stays & torch.from_numpy(sparse)[:, torch.arange(n) // sealed.slots]
    else:
        sealed.forget(sequence)
    _lay(table, sealed, sequence, found, loose, seal=seal)
    sealed.drop_pages(rows, sparse)


def seal_due(table: RegionTable, active: np.ndarray) -> None:
    """Before a decoding step of the sequences that are `active` (S,) bool: seal what has gathered in plain pages."""
    sealed = table.sealed
    if sealed is None or sealed.codec.tiered:
        return
    due = active & (table.lengths() >= most_loose(sealed)).any(1)
    for sequence in np.flatnonzero(due).tolist():
        rows = table.rows(sequence)
        width = int(table.lengths()[sequence].max())
        found = Candidates(*ops.read(table.pool.arrays, table.pages[rows], table.lens[rows], width))
        sparse = sealed.sparse(rows)
        if sparse.any():
            found = _behind(sealed.pages_of(rows, sparse), found)
        _lay(table, sealed, sequence, found, found.positions >= 0, seal=True)
        sealed.drop_pages(rows, sparse)


def most_loose(sealed: Sealed) -> int:
    """Plain entries of a region at which a page of them is sealed."""
    return sealed.codec.sinks + sealed.codec.residual + sealed.slots


def truncate(sealed: Sealed, sequence: int, seen: int) -> np.ndarray:
    """Let go of the sealed entries at positions from `seen` on; returns how many of each head, (H,)."""
    rows = sealed.rows(sequence)
    gone = sealed.positions(rows) >= seen
    sealed.bury(rows, gone)
    return gone.sum(1).numpy().astype(np.int32)


def _behind(first: Dense, then: Candidates) -> Candidates:
    """Two runs of entries as one, in the dtype of the second."""
    if not first.positions.shape[1]:
        return then
    masses = None
    if then.log_masses is not None and first.log_masses is not None:
        masses = torch.cat([first.log_masses, then.log_masses], 1)
    return Candidates(
        torch.cat([first.keys.to(then.keys.dtype), then.keys], 1),
        torch.cat([first.values.to(then.values.dtype), then.values], 1),
        torch.cat([first.positions, then.positions], 1), torch.cat([first.scores, then.scores], 1), masses,
    )  # fmt: skip


def _lay(table: RegionTable, sealed: Sealed, sequence: int, found: Candidates, loose: Tensor, *, seal: bool) -> None:
    """Write the `loose` candidates (H, N): the oldest behind what is sealed, the others to fresh plain pages."""
    codec, page = sealed.codec, sealed.slots
    counts = loose.sum(1)
    order = by_position(torch.where(loose, found.positions, -1))
    sinks = (loose & (found.positions < codec.sinks)).sum(1)
    more = (counts - codec.sinks - codec.residual).clamp(min=0) // page * page * int(seal and not codec.tiered)
    column = torch.arange(int(more.max()))
    chosen = (sinks[:, None] + column).clamp(max=order.shape[1] - 1)
    sealed.write(sequence, more, order.gather(1, chosen), Dense(*found[:5]))
    left = counts - more
    column = torch.arange(int(left.max())).expand(len(left), -1)
    column = torch.where(column < sinks[:, None], column, column + more[:, None]).clamp(max=order.shape[1] - 1)
    hold(table, sequence, found, order.gather(1, column), left)
