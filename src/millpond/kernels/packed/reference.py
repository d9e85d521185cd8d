"""The ops over packed pages in plain torch: the truth that native code is held to. Meaning of arguments: see `ops`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from millpond.kernels import reference as plain
from millpond.kernels.decode_rules import DecodeRule, Signal
from millpond.kernels.packed import bulk_write, side_codec
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.pages import PageArrays

#: Pages that `read` decodes at a time.
READ_TOGETHER = 256


def stored_keys(regions: PackedRegions, r: int, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys (n, head_dim) of region r as they are stored: before RoPE, or the kept channels, balanced."""
    if regions.rope is not None:
        return regions.rope.turn_back(keys.float(), positions)
    if regions.channels is not None:
        keys = keys[:, regions.channels[r].long()]
    return keys.float() / regions.balance[r] if regions.balance is not None else keys


def _whole_keys(regions: PackedRegions, r: Tensor, keys: Tensor, positions: Tensor, head_dim: int) -> Tensor:
    """The keys (n, head_dim) that stored ones of regions r (n,) stand for: zero in the channels that were dropped."""
    if regions.rope is not None:
        return regions.rope.turn(keys, positions)
    if regions.balance is not None:
        keys = keys * regions.balance[r]
    if regions.channels is None:
        return keys
    return keys.new_zeros(len(keys), head_dim).scatter(1, regions.channels[r].long(), keys)


def write(
    regions: PackedRegions,
    start: Tensor,
    count: Tensor,
    index: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scores: Tensor | None = None,
    log_masses: Tensor | None = None,
) -> None:
    pages = regions.pages
    if bulk_write.is_whole(regions, start, count):
        bulk_write.write(regions, start, count, index, keys, values, positions, scores, log_masses)
        return
    for r in range(regions.table.shape[0]):
        n, begin = int(count[r]), int(start[r])
        if n <= 0:
            continue
        row, own_head = index[r, :n].long(), torch.tensor([r], device=index.device)
        pair = (stored_keys(regions, r, keys[r, row], positions[r, row]), values[r, row])
        slots = torch.arange(begin, begin + n, device=index.device)
        for i in range(begin // pages.slots, (begin + n - 1) // pages.slots + 1):
            mine = slots // pages.slots == i
            arena, at = divmod(int(regions.table[r, i]), pages.pages_per_arena)
            first = int(slots[mine][0]) % pages.slots
            own = slice(first, first + int(mine.sum()))
            bytes_ = pages.codes[arena][at]
            for (side, offsets, dim, is_key), x in zip(side_codec.sides(pages.layout), pair, strict=True):
                new = side_codec.encode(x[mine][None], side, bulk_write.fixed_of(regions, own_head) if is_key else None)
                if own != slice(0, pages.slots):
                    old = side_codec.from_bytes(bytes_[None], side, offsets, pages.slots, dim, is_key)
                    new = side_codec.replace_slots(old, new, side, first)
                bytes_[offsets.codes : offsets.codes + offsets.size] = side_codec.to_bytes(new, side, is_key)[0]
            chosen = row[mine]
            pages.positions[arena][at, own] = positions[r, chosen]
            pages.scores[arena][at, own] = 0.0 if scores is None else scores[r, chosen]
            if pages.masses:
                pages.log_masses[arena][at, own] = 0.0 if log_masses is None else log_masses[r, chosen]


def read(regions: PackedRegions, width: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    pages, n_regions = regions.pages, regions.table.shape[0]
    zeros = partial(torch.zeros, n_regions, width, device=regions.table.device)
    keys, values = zeros(head_dim), zeros(pages.layout.value_dim)
    positions = zeros(dtype=torch.int32).fill_(-1)
    scores, masses = zeros(), zeros() if pages.masses else None
    if not width or not pages.codes:
        return keys, values, positions, scores, masses
    slots, columns = (torch.arange(n, device=regions.table.device) for n in (pages.slots, regions.table.shape[1]))
    used = columns * pages.slots < regions.lens[:, None]  # (R, n) pages
    region, column = used.nonzero().unbind(1)
    for first in range(0, len(region), READ_TOGETHER):
        part = slice(first, first + READ_TOGETHER)
        r, begin = region[part], column[part] * pages.slots
        ids = regions.table[r, column[part]].long()
        inside = begin[:, None] + slots < regions.lens[r][:, None]
        row, at = r[:, None].expand_as(inside)[inside], (begin[:, None] + slots)[inside]
        found = _decoded(regions, ids, r)
        positions[row, at] = _rows(pages.positions, ids)[inside]
        keys[row, at] = _whole_keys(regions, row, found[0][inside], positions[row, at], head_dim)
        values[row, at] = found[1][inside]
        scores[row, at] = _rows(pages.scores, ids)[inside]
        if masses is not None:
            masses[row, at] = _rows(pages.log_masses, ids)[inside]
    return keys, values, positions, scores, masses


def _rows(arenas: list[Tensor], ids: Tensor) -> Tensor:
    """Whole pages (n, ...) out of a list of arenas."""
    per = arenas[0].shape[0]
    out = arenas[0].new_empty(len(ids), *arenas[0].shape[1:])
    for i, arena in enumerate(arenas):
        here = ids // per == i
        out[here] = arena[ids[here] - i * per]
    return out


def _decoded(regions: PackedRegions, ids: Tensor, r: Tensor) -> list[Tensor]:
    """Keys as stored and values (n, slots, dim) float32 of whole pages `ids` (n,) of regions `r` (n,)."""
    pages, found = regions.pages, []
    rows = _rows(pages.codes, ids)
    for side, offsets, dim, is_key in side_codec.sides(pages.layout):
        fixed = bulk_write.fixed_of(regions, r) if is_key else None
        parts = side_codec.from_bytes(rows, side, offsets, pages.slots, dim, is_key)
        found.append(side_codec.decode(parts, side, fixed))
    return found


def decode(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    pages: PageArrays,
    table: Tensor,
    lens: Tensor,
    caps: Tensor,
    recent: Tensor,
    q_pos: Tensor,
    rule: DecodeRule,
    packed: PackedRegions,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As one region of numbers: both parts are copied into one, `reference.decode` runs, and what it did is undone."""
    joined = _Joined(pages, table, lens, packed, q.shape[-1])
    before = joined.lens.clone()
    k_stored, v_stored = k_new.to(pages.dtype), v_new.to(pages.dtype)
    out, lse, evicted = plain.decode(
        q.float(), k_stored.float(), v_stored.float(), joined.pages, joined.table, joined.lens, caps, recent, q_pos,
        rule, scale=scale, softcap=softcap, window=window, sink_logits=sink_logits,
    )  # fmt: skip
    scores = joined.read()[3]
    new = joined.new_slots(q_pos, before)
    if rule.signal is not Signal.NONE:
        joined.put_scores(scores, before, new)
    width = k_new.shape[1]
    for r, slot in new.items():
        plain_n = int(lens[r])
        target = plain_n
        if slot < plain_n:
            target = slot
        elif slot < int(before[r]):
            joined.bury(r, slot)
        row, one = torch.zeros(1, 1, dtype=torch.int32, device=lens.device), torch.ones_like(lens[:1])
        plain.write(
            pages, table[r : r + 1], target * one, one, row,
            k_stored.reshape(-1, 1, k_stored.shape[-1])[r : r + 1],
            v_stored.reshape(-1, 1, v_stored.shape[-1])[r : r + 1],
            q_pos[r // width].reshape(1, 1), scores[r, slot].reshape(1, 1),
        )  # fmt: skip
        lens[r] += int(target == plain_n)
    return out.to(q.dtype), lse, evicted


class _Joined:
    """The plain and the packed entries of every region in one pool of float32, tombstones left out."""

    def __init__(self, pages: PageArrays, table: Tensor, lens: Tensor, packed: PackedRegions, head_dim: int) -> None:
        self.plain, self.plain_table, self.plain_lens, self.packed = pages, table, lens, packed
        n_regions, most = len(lens), int(packed.lens.max()) if len(lens) else 0
        dense = plain.read(pages, table, lens, int(lens.max()) if n_regions else 0)
        coded = read(packed, most, head_dim)
        self.alive = [(coded[2][r, : int(packed.lens[r])] >= 0).nonzero()[:, 0] for r in range(n_regions)]
        masses = pages.masses or packed.pages.masses
        rows: list[list[Tensor]] = []
        for r in range(n_regions):
            n = int(lens[r])
            pair = [(d[r, :n].float(), c[r, self.alive[r]]) for d, c in zip(dense[:4], coded[:4], strict=True)]
            if masses:
                own, theirs = (
                    t[r] if t is not None else torch.zeros(w, device=lens.device)
                    for t, w in ((dense[4], dense[0].shape[1]), (coded[4], most))
                )
                pair.append((own[:n], theirs[self.alive[r]]))
            rows.append([torch.cat(p) for p in pair])
        self.lens = torch.tensor([len(row[0]) for row in rows], dtype=torch.int32).to(lens.device)
        width = int(self.lens.max()) + 1 if n_regions else 1
        shape = (max(1, n_regions), width, pages.key_dim, pages.value_dim)
        self.pages = PageArrays(shape[0], width, shape[2], shape[3], torch.float32, lens.device, masses)
        self.pages.add_arena()
        self.table = torch.arange(n_regions, dtype=torch.int32, device=lens.device)[:, None]
        arenas = self.pages.arrays
        for r, row in enumerate(rows):
            for arena, x in zip(arenas, row, strict=True):
                arena[0][r, : len(x)] = x.to(arena[0].dtype)

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        return plain.read(self.pages, self.table, self.lens, int(self.lens.max()))

    def new_slots(self, q_pos: Tensor, before: Tensor) -> dict[int, int]:
        """Where the new entry of each region lies, for those that stored it."""
        heads = len(before) // len(q_pos)
        found = {}
        for r in range(len(before)):
            position = int(q_pos[r // heads])
            held = self.pages.positions[0][r, : int(self.lens[r])]
            slots = (held == position).nonzero()[:, 0] if position >= 0 else held[:0]
            if len(slots):
                found[r] = int(slots[-1])
        return found

    def put_scores(self, scores: Tensor, before: Tensor, new: dict[int, int]) -> None:
        """Write the accumulators back to where the entries came from."""
        for r in range(len(before)):
            n = int(self.plain_lens[r])
            slots = torch.arange(n, device=self.plain_lens.device)
            keep = slots != new.get(r, -1)
            ids = plain.slot_ids(self.plain, self.plain_table[r : r + 1], slots[None])[0]
            plain.scatter(self.plain.scores, ids[keep], scores[r, :n][keep])
            alive, pages = self.alive[r], self.packed.pages
            for i, slot in enumerate(alive.tolist()):
                arena, at = divmod(int(self.packed.table[r, slot // pages.slots]), pages.pages_per_arena)
                pages.scores[arena][at, slot % pages.slots] = scores[r, n + i]

    def bury(self, r: int, slot: int) -> None:
        """Leave a tombstone in the packed slot that became slot `slot` of the joined region."""
        pages = self.packed.pages
        own = int(self.alive[r][slot - int(self.plain_lens[r])])
        arena, at = divmod(int(self.packed.table[r, own // pages.slots]), pages.pages_per_arena)
        pages.positions[arena][at, own % pages.slots] = -1
        self.packed.dead[r] += 1
