"""Decoding steps in plain torch, over plain and packed pages: see `ops.decode` and `OpSet.decode_rows`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from millpond.kernels.args import (
    AttendOutput,
    DecodeArgs,
    DecodeOutput,
    DecodeRowsArgs,
    EntryRows,
    HeadRuleArgs,
    PageRegions,
    SharedDecodeArgs,
    StepRegions,
)
from millpond.kernels.decode_rules import KEEP_ALL, UNBOUNDED, Evict, Signal, choose_evicted
from millpond.kernels.eager.attention import attend_shared
from millpond.kernels.eager.packed_pages import read_packed
from millpond.kernels.eager.pages import occupied, read, scatter, slot_ids, write
from millpond.kernels.eager.softmax import INF, reduce_group, soft_cap, softmax_with_sink, wide
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.pages import PageArrays


def decode(args: DecodeArgs) -> DecodeOutput:
    """Decode over plain pages; entries in packed ones are not read."""
    q, k_new, v_new, regions = args.q, args.k_new, args.v_new, args.regions
    (pages, table, lens), rule, shape = regions.plain.parts, regions.rule, regions.shape
    n_seq, n_heads, _ = q.shape
    n_kv_heads = k_new.shape[1]
    group, n_regions = n_heads // n_kv_heads, n_seq * n_kv_heads
    stored = int(lens.max()) if n_regions else 0
    keys, values, positions, scores, log_masses = read(regions.plain, stored)
    dtype = wide(pages.dtype)
    pos_r = regions.q_pos.repeat_interleave(n_kv_heads)[:, None]  # (R, 1)
    active = pos_r >= 0

    # columns: the stored entries, then the new one (rounded to the storage dtype, as it will be read later)
    k_row, v_row = (t.to(pages.dtype).reshape(n_regions, 1, -1) for t in (k_new, v_new))
    keys, values = torch.cat([keys, k_row], 1).to(dtype), torch.cat([values, v_row], 1).to(dtype)
    positions = torch.cat([positions, pos_r.int()], 1)
    visible = (positions >= 0) & active
    if shape.window:
        visible &= pos_r - positions < shape.window

    logits = soft_cap(
        q.to(dtype).reshape(n_regions, group, -1) @ keys.transpose(1, 2) * shape.scale, shape.softcap
    )  # (R, group, T)
    if log_masses is not None:
        logits[..., :stored] += log_masses.to(dtype)[:, None]
    sink = None
    if shape.sink_logits is not None:
        sink = shape.sink_logits.to(dtype).view(1, n_kv_heads, group, 1).expand(n_seq, -1, -1, -1)
        sink = sink.reshape(n_regions, group, 1)
        sink = sink.masked_fill(~active[..., None], -INF)
    p, lse = softmax_with_sink(logits, visible[:, None], sink)
    out = p @ values

    # signal
    received = reduce_group(p, rule.reduce, 1).float()
    scores = torch.cat([scores, torch.zeros(n_regions, 1, device=scores.device)], 1)
    if rule.signal is Signal.SUM:
        scores = rule.decay * scores + received
    elif rule.signal is Signal.LAST:
        scores = received
    if rule.signal is not Signal.NONE and stored:
        ids, valid = occupied(pages, table, lens, stored)
        valid &= active
        scatter(pages.scores, ids[valid], scores[:, :stored][valid])

    # the new entry: append, or take the victim's slot
    grows = active[:, 0] & ((lens < regions.caps) | (rule.evict is Evict.NEVER))
    full = active[:, 0] & ~grows
    spans = (regions.kept, regions.least)
    victim = choose_evicted(rule, scores, positions, pos_r, regions.recent, shape.window, n_kv_heads, *spans)
    slot = torch.where(grows, lens.long(), victim)
    stores = grows | (full & (victim < stored))
    evicted = torch.where(full, positions.gather(1, victim[:, None])[:, 0], -1)
    if bool(stores.any()):
        ids = slot_ids(pages, table[stores], slot[stores, None])[:, 0]
        scatter(pages.keys, ids, k_row[stores, 0])
        scatter(pages.values, ids, v_row[stores, 0])
        scatter(pages.positions, ids, pos_r[stores, 0])
        scatter(pages.scores, ids, scores[stores, -1] if rule.signal is not Signal.NONE else scores[stores, -1] * 0)
        if pages.masses:
            scatter(pages.log_masses, ids, torch.zeros(len(ids), device=ids.device))
    lens += grows.int()
    heads = (n_seq, n_heads)
    return DecodeOutput(out.reshape(*heads, -1).to(q.dtype), lse.reshape(heads).float(), evicted.int())


def decode_packed(args: DecodeArgs) -> DecodeOutput:
    """Decode over plain and packed pages as one region of numbers.

    Both parts are copied into one, `decode` runs, and its changes are written back.
    """
    regions = args.regions
    if regions.packed is None:
        return decode(args)
    rule, q_pos, (pages, table, lens) = regions.rule, regions.q_pos, regions.plain.parts
    joined = _Joined(regions.plain, regions.packed, args.q.shape[-1])
    before = joined.lens.clone()
    k_stored, v_stored = args.k_new.to(pages.dtype), args.v_new.to(pages.dtype)
    together = replace(regions, plain=joined.regions, packed=None)
    out, lse, evicted = decode(DecodeArgs(args.q.float(), k_stored.float(), v_stored.float(), together))
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
        row, ones = slice(r, r + 1), torch.ones_like(lens[:1])
        new_rows = EntryRows(
            target * ones,
            ones,
            torch.zeros(1, 1, dtype=torch.int32, device=lens.device),
            k_stored.reshape(-1, 1, k_stored.shape[-1])[row],
            v_stored.reshape(-1, 1, v_stored.shape[-1])[row],
            q_pos[r // width].reshape(1, 1),
            scores[r, slot].reshape(1, 1),
        )
        write(PageRegions(pages, table[row], lens[row]), new_rows)
        lens[r] += int(target == plain_n)
    return DecodeOutput(out.to(args.q.dtype), lse, evicted)


class _Joined:
    """Plain and packed entries of every region in one pool of float32, without tombstones."""

    def __init__(self, regions: PageRegions, packed: PackedRegions, head_dim: int) -> None:
        pages, table, lens = regions.parts
        self.plain, self.plain_table, self.plain_lens, self.packed = pages, table, lens, packed
        n_regions, max_packed = len(lens), int(packed.lens.max()) if len(lens) else 0
        dense = read(regions, int(lens.max()) if n_regions else 0)
        coded = read_packed(packed, max_packed, head_dim)
        self.alive = [(coded[2][r, : int(packed.lens[r])] >= 0).nonzero()[:, 0] for r in range(n_regions)]
        masses = pages.masses or packed.pages.masses
        rows: list[list[Tensor]] = []
        for r in range(n_regions):
            n = int(lens[r])
            pair = [(d[r, :n].float(), c[r, self.alive[r]]) for d, c in zip(dense[:4], coded[:4], strict=True)]
            if masses:
                own_sums, theirs = (
                    t[r] if t is not None else torch.zeros(w, device=lens.device)
                    for t, w in ((dense[4], dense[0].shape[1]), (coded[4], max_packed))
                )
                pair.append((own_sums[:n], theirs[self.alive[r]]))
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
        """Return the slot of the new entry of each region that stored it."""
        heads = len(before) // len(q_pos)
        last_slots = {}
        for r in range(len(before)):
            position = int(q_pos[r // heads])
            positions = self.pages.positions[0][r, : int(self.lens[r])]
            slots = (positions == position).nonzero()[:, 0] if position >= 0 else positions[:0]
            if len(slots):
                last_slots[r] = int(slots[-1])
        return last_slots

    def put_scores(self, scores: Tensor, before: Tensor, new: dict[int, int]) -> None:
        """Write the accumulators back to the pages that the entries came from."""
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
        region = int(self.alive[r][slot - int(self.plain_lens[r])])
        arena, at = divmod(int(self.packed.table[r, region // pages.slots]), pages.pages_per_arena)
        pages.positions[arena][at, region % pages.slots] = -1
        self.packed.dead[r] += 1


def one_by_one(args: DecodeRowsArgs, step: Callable[[DecodeArgs], DecodeOutput]) -> AttendOutput:
    """Run a decoding step for each column."""
    caps = torch.full_like(args.regions.lens, UNBOUNDED)
    recent = torch.zeros_like(caps)
    outs, sums = [], []
    for column in range(args.q.shape[2]):
        regions = StepRegions(args.regions, caps, recent, args.q_pos[:, column].contiguous(), KEEP_ALL, args.shape)
        q, k, v = (t[:, :, column] for t in (args.q, args.k_new, args.v_new))
        out, lse, _ = step(DecodeArgs(q, k, v, regions))
        outs.append(out)
        sums.append(lse)
    return AttendOutput(torch.stack(outs, 2), torch.stack(sums, 2))


def decode_shared(args: SharedDecodeArgs) -> AttendOutput:
    return attend_shared(args, decode(args.step))


def decode_rows(args: DecodeRowsArgs) -> AttendOutput:
    return one_by_one(args, decode_packed)


def admit(args: HeadRuleArgs) -> bool:
    """Do nothing, and return False."""
    return False
