"""One decoding step over plain and packed pages in plain torch: see `ops.decode`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from millpond.kernels.args import DecodeArgs, DecodeOutput, EntryRows, PageRegions
from millpond.kernels.decode_rules import Signal
from millpond.kernels.eager.decode import decode as decode_plain
from millpond.kernels.eager.packed_pages import read_packed
from millpond.kernels.eager.pages import read, scatter, slot_ids, write
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.pages import PageArrays


def decode(args: DecodeArgs) -> DecodeOutput:
    """As one region of numbers: both parts are copied into one, `decode_plain` runs, and what it did is undone."""
    regions = args.regions
    if regions.packed is None:
        return decode_plain(args)
    rule, q_pos, (pages, table, lens) = regions.rule, regions.q_pos, regions.plain.parts
    joined = _Joined(regions.plain, regions.packed, args.q.shape[-1])
    before = joined.lens.clone()
    k_stored, v_stored = args.k_new.to(pages.dtype), args.v_new.to(pages.dtype)
    together = replace(regions, plain=joined.regions, packed=None)
    out, lse, evicted = decode_plain(DecodeArgs(args.q.float(), k_stored.float(), v_stored.float(), together))
    scores = read(joined.regions, int(joined.lens.max())).scores
    new = joined.new_slots(q_pos, before)
    if rule.signal is not Signal.NONE:
        joined.put_scores(scores, before, new)
    width = args.k_new.shape[1]
    for r, slot in new.items():
        plain_n = int(lens[r])
        target = plain_n
        if slot < plain_n:
            target = slot
        elif slot < int(before[r]):
            joined.bury(r, slot)
        here, one = slice(r, r + 1), torch.ones_like(lens[:1])
        given = EntryRows(
            target * one,
            one,
            torch.zeros(1, 1, dtype=torch.int32, device=lens.device),
            k_stored.reshape(-1, 1, k_stored.shape[-1])[here],
            v_stored.reshape(-1, 1, v_stored.shape[-1])[here],
            q_pos[r // width].reshape(1, 1),
            scores[r, slot].reshape(1, 1),
        )
        write(PageRegions(pages, table[here], lens[here]), given)
        lens[r] += int(target == plain_n)
    return DecodeOutput(out.to(args.q.dtype), lse, evicted)


class _Joined:
    """The plain and the packed entries of every region in one pool of float32, tombstones left out."""

    def __init__(self, regions: PageRegions, packed: PackedRegions, head_dim: int) -> None:
        pages, table, lens = regions.parts
        self.plain, self.plain_table, self.plain_lens, self.packed = pages, table, lens, packed
        n_regions, most = len(lens), int(packed.lens.max()) if len(lens) else 0
        dense = read(regions, int(lens.max()) if n_regions else 0)
        coded = read_packed(packed, most, head_dim)
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

    @property
    def regions(self) -> PageRegions:
        return PageRegions(self.pages, self.table, self.lens)

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
            ids = slot_ids(self.plain, self.plain_table[r : r + 1], slots[None])[0]
            scatter(self.plain.scores, ids[keep], scores[r, :n][keep])
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
