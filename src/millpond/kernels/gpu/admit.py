# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Entries that heads with rules of their own let go of after a step (`OpSet.admit`), and gaps that close.

A program decides for one region. Entries are never marked: those that leave at a stage are the free ones up to a key,
which is found again wherever it is asked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.args import HeadRuleArgs
from millpond.kernels.gpu.common import (
    KEYS,
    LOG_MASSES,
    POSITIONS,
    SCORES,
    TYPES,
    VALUES,
    block_of,
    check,
    locate,
    on_its_device,
    page_logs,
    rows_of,
    slot_rows,
)
from millpond.kernels.gpu.score import LAST_INT

CHUNK = 512  #: slots that a program looks at together

# classes of tokens, and rules of heads: `policy.token_classes`, `policy.needs.HeadRule`
PUNCTUATION = tl.constexpr(1)
SPECIAL = tl.constexpr(2)
WITH_PUNCTUATION = tl.constexpr(1)
WITH_FREQUENT = tl.constexpr(2)
WITH_LOCAL = tl.constexpr(3)
EVERYTHING = tl.constexpr(4)

# entries leave in stages: by the rule of their head; then, of sequences that hold too much, three more
OWN_RULE = tl.constexpr(0)
NEITHER_FIXED_NOR_NEWEST = tl.constexpr(1)
NOT_SPECIAL = tl.constexpr(2)
NO_SINK = tl.constexpr(3)
NOTHING = tl.constexpr(4)

LOWEST = tl.constexpr(-(2**63))
HIGHEST = tl.constexpr(2**63 - 1)


@triton.jit
def in_order(score, position):
    """Return an integer in the order of the floats, then of the positions.

    It is the key of `policy.head_allocation.lowest_scored`.
    """
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # one zero of the two
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) + position.to(tl.int64)


@triton.jit
def judged(
    region, first, keys, STAGE: tl.constexpr, LOG_SLOTS: tl.constexpr, LOG_PAGES: tl.constexpr, CHUNK: tl.constexpr
):
    """Return the slots of a chunk, and of each what is known before a stage.

    That is whether it has an entry, whether the entry left before, whether it may leave in this stage, and its key.
    region: see `let_go`; keys: of each stage that is over, the key up to which free entries left in it.
    """
    bases, n_arenas, table_row, n, ids_row, classes, last_class, kind, local, seen, sinks, window, newest = region
    slot = first + tl.arange(0, CHUNK)
    ok = slot < n
    arena, row = locate(table_row, slot, ok, LOG_SLOTS, LOG_PAGES)
    position = tl.load(slot_rows(bases, n_arenas, POSITIONS, arena, row, ok, 1, tl.int32), mask=ok, other=0)
    score = tl.load(slot_rows(bases, n_arenas, SCORES, arena, row, ok, 1, tl.float32), mask=ok, other=0.0)
    key = in_order(score, position)
    token = tl.load(ids_row + position, mask=ok, other=0)
    token = tl.minimum(tl.maximum(token, 0), last_class)
    token_class = tl.load(classes + token, mask=ok, other=0).to(tl.int32)
    token_class = tl.where(position < sinks, SPECIAL, token_class)
    age = seen - position
    fixed = (token_class == SPECIAL) | ((token_class == PUNCTUATION) & (kind >= WITH_PUNCTUATION))
    near = (age <= local) & (kind >= WITH_LOCAL)
    shown = ok & ((window == 0) | (age < window))
    left = ok & (shown == 0)
    free = shown & (fixed == 0) & (near == 0) & (kind < EVERYTHING)
    if STAGE > OWN_RULE:
        left = left | (free & (key <= keys[0]))
        free = shown & (fixed == 0) & ((near & (age <= newest)) == 0)
    if STAGE > NEITHER_FIXED_NOR_NEWEST:
        left = left | (free & (key <= keys[1]))
        free = shown & (token_class != SPECIAL)
    if STAGE > NOT_SPECIAL:
        left = left | (free & (key <= keys[2]))
        free = shown & (position >= sinks)
    if STAGE > NO_SINK:
        left = left | (free & (key <= keys[3]))
    return slot, ok, left, free & (left == 0), key


@triton.jit
def counted(region, keys, STAGE: tl.constexpr, LOG_SLOTS: tl.constexpr, LOG_PAGES: tl.constexpr, CHUNK: tl.constexpr):
    """Return how many entries have left before a stage, and how many may leave in it."""
    n = region[3]
    n_left = n * 0
    n_free = n * 0
    for first in range(0, n, CHUNK):
        _slot, _ok, left, free, _key = judged(region, first, keys, STAGE, LOG_SLOTS, LOG_PAGES, CHUNK)
        n_left += tl.sum(left.to(tl.int32), 0)
        n_free += tl.sum(free.to(tl.int32), 0)
    return n_left, n_free


@triton.jit
def key_of_last(
    spare,
    n_free,
    region,
    keys,
    STAGE: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the key of the last of the `spare` lowest of `n_free` free entries."""
    n = region[3]
    last = tl.full([], LOWEST, tl.int64)
    if spare >= n_free:
        last = tl.full([], HIGHEST, tl.int64)
        spare = n_free * 0
    for _turn in range(0, spare):  # one or two: what a step added, or what became too old for a rule
        least = tl.full([], HIGHEST, tl.int64)
        for first in range(0, n, CHUNK):
            _slot, _ok, _left, free, key = judged(region, first, keys, STAGE, LOG_SLOTS, LOG_PAGES, CHUNK)
            least = tl.minimum(least, tl.min(tl.where(free & (key > last), key, HIGHEST), 0))
        last = least
    return last


@triton.jit
def share_of(h, stays, left, HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr):
    """Return the entries that head h of a sequence may hold.

    They are those of `policy.head_rules.shorten`. stays: pointer to (HEADS,) int32; left: int64, entries that all heads
    may hold together.
    """
    g = tl.arange(0, HEADS_BLOCK)
    counts = tl.load(stays + g, mask=g < HEADS, other=0)
    own = tl.load(stays + h)
    if tl.sum(counts, 0) > left:
        waiting = tl.where(g < HEADS, 1, 0)
        for place in range(0, HEADS):
            low = tl.min(tl.where(waiting != 0, counts, LAST_INT), 0)
            at = tl.min(tl.where((waiting != 0) & (counts == low), g, LAST_INT), 0)
            part = tl.minimum(low, (left // (HEADS - place)).to(tl.int32))
            left -= part
            waiting = tl.where(g == at, 0, waiting)
            own = tl.where(at == h, part, own)
    return own


@triton.jit
def move_row(where, WHICH: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    """Copy a row of one of the arrays of the pages to another slot."""
    bases, n_arenas, to_arena, to_row, arena, row = where
    d = tl.arange(0, BLOCK)
    inside = d < DIM
    numbers = tl.load(slot_rows(bases, n_arenas, WHICH, arena, row, True, DIM, TYPE) + d, mask=inside)
    tl.store(slot_rows(bases, n_arenas, WHICH, to_arena, to_row, True, DIM, TYPE) + d, numbers, mask=inside)


@triton.jit(do_not_specialize=["n_arenas", "last_class", "sinks", "window"])
def let_go(
    bases,
    n_arenas,
    table,
    table_stride,
    lens,
    sequences,
    ids,
    ids_stride,
    classes,
    last_class,
    kinds,
    local,
    seen,
    quota,
    most,
    sinks,
    window,
    keys,
    stays,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    TYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    BOUNDED: tl.constexpr,
    BEGINS: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Let go of what a head does not keep, and move its last entries into the slots.

    Of BOUNDED sequences one launch BEGINS, and writes how many entries stay of each head by its own rule; another ENDS,
    when those of all heads are known. Else one launch does both.
    """
    program = tl.program_id(0).to(tl.int64)
    i = program // HEADS
    h = (program % HEADS).to(tl.int32)
    s = tl.load(sequences + i)
    r = s * HEADS + h
    n = tl.load(lens + r)
    kind = tl.load(kinds + r).to(tl.int32)
    table_row = table + r * table_stride
    rule = (kind, tl.load(local + s * HEADS), tl.load(seen + i).to(tl.int32), sinks, window)
    entries = (bases, n_arenas, table_row, n, ids + s * ids_stride, classes, last_class.to(tl.int64))
    region = entries + rule + (n * 0,)
    key_0 = tl.full([], LOWEST, tl.int64)
    key_1 = tl.full([], LOWEST, tl.int64)
    key_2 = tl.full([], LOWEST, tl.int64)
    key_3 = tl.full([], LOWEST, tl.int64)
    if BEGINS:
        n_left, n_free = counted(region, (), OWN_RULE, LOG_SLOTS, LOG_PAGES, CHUNK)
        spare = n_free
        if kind >= WITH_FREQUENT:
            spare = tl.maximum(n_free - tl.load(quota + i).to(tl.int32), 0)
        key_0 = key_of_last(spare, n_free, region, (), OWN_RULE, LOG_SLOTS, LOG_PAGES, CHUNK)
        after = n - n_left - spare
        if BOUNDED:
            tl.store(keys + program, key_0)
            tl.store(stays + program, after)
    else:
        key_0 = tl.load(keys + program)
        after = tl.load(stays + program)
    if ENDS:
        if BOUNDED:
            allowed = share_of(h, stays + i * HEADS, tl.load(most + i), HEADS, HEADS_BLOCK)
            region = entries + rule + (allowed // 2,)
            if after > allowed:
                for stage in tl.static_range(1, 4):
                    before = (key_0, key_1, key_2)
                    _n_left, n_free = counted(region, before, stage, LOG_SLOTS, LOG_PAGES, CHUNK)
                    spare = tl.minimum(after - allowed, n_free)
                    key = tl.full([], LOWEST, tl.int64)
                    if spare > 0:
                        key = key_of_last(spare, n_free, region, before, stage, LOG_SLOTS, LOG_PAGES, CHUNK)
                    after -= spare
                    if stage == 1:
                        key_1 = key
                    elif stage == 2:
                        key_2 = key
                    else:
                        key_3 = key
        if after < n:
            gone = (key_0, key_1, key_2, key_3)
            last_stage: tl.constexpr = NOTHING if BOUNDED else NEITHER_FIXED_NOR_NEWEST
            # of the slots before `after` those without an entry are as many as those behind with one
            to = n * 0 - 1
            source = after - 1
            while source < n:
                next_to = tl.full([], LAST_INT, tl.int32)
                next_source = tl.full([], LAST_INT, tl.int32)
                for first in range(0, n, CHUNK):
                    slot, ok, left, _free, _key = judged(region, first, gone, last_stage, LOG_SLOTS, LOG_PAGES, CHUNK)
                    next_to = tl.minimum(next_to, tl.min(tl.where(left & (slot > to), slot, LAST_INT), 0))
                    held = ok & (left == 0) & (slot > source)
                    next_source = tl.minimum(next_source, tl.min(tl.where(held, slot, LAST_INT), 0))
                to = next_to
                source = next_source
                if source < n:
                    to_arena, to_row = locate(table_row, to, True, LOG_SLOTS, LOG_PAGES)
                    arena, row = locate(table_row, source, True, LOG_SLOTS, LOG_PAGES)
                    where = (bases, n_arenas, to_arena, to_row, arena, row)
                    move_row(where, KEYS, KEY_DIM, KEY_BLOCK, TYPE)
                    move_row(where, VALUES, VALUE_DIM, VALUE_BLOCK, TYPE)
                    move_row(where, POSITIONS, 1, 1, tl.int32)
                    move_row(where, SCORES, 1, 1, tl.float32)
                    if HAS_MASSES:
                        move_row(where, LOG_MASSES, 1, 1, tl.float32)
            # all threads have read the length before one of them changes it
            tl.debug_barrier()
            tl.store(lens + r, after)


# ---------------------------------------------------------------------------------------------- at launch


def _whole(x: Tensor) -> Tensor:
    return x if x.dtype is torch.int64 and x.is_contiguous() else x.to(torch.int64).contiguous()


@on_its_device
def admit(args: HeadRuleArgs) -> bool:
    (pages, table, lens), n = args.regions.parts, len(args.sequences)
    check(table.device, pages.dtype)
    if lens.dtype is not torch.int32 or not lens.is_contiguous():
        raise OptionError("lens is written in place: it must be a contiguous int32 tensor")
    if n == 0 or pages.n_arenas == 0 or table.shape[1] == 0:
        return True
    heads, table, ids = len(lens) // len(args.ids), rows_of(table), rows_of(args.ids)
    keys = torch.empty(n * heads, dtype=torch.int64, device=lens.device)
    stays = torch.empty(n * heads, dtype=torch.int32, device=lens.device)
    parts = [(True, False), (False, True)] if args.bounded else [(True, True)]
    for begins, ends in parts:
        let_go[(n * heads,)](
            pages.bases,
            pages.bases.shape[1],
            table,
            table.stride(0),
            lens,
            _whole(args.sequences),
            ids,
            ids.stride(0),
            args.classes.contiguous(),
            len(args.classes) - 1,
            _whole(args.kinds),
            args.local.contiguous(),
            _whole(args.seen),
            _whole(args.quota),
            _whole(args.most),
            args.sinks,
            args.window,
            keys,
            stays,
            HEADS=heads,
            HEADS_BLOCK=block_of(heads),
            KEY_DIM=pages.key_dim,
            VALUE_DIM=pages.value_dim,
            KEY_BLOCK=block_of(pages.key_dim),
            VALUE_BLOCK=block_of(pages.value_dim),
            TYPE=TYPES[pages.dtype],
            CHUNK=CHUNK,
            HAS_MASSES=pages.masses,
            BOUNDED=args.bounded,
            BEGINS=begins,
            ENDS=ends,
            **page_logs(pages),
        )
    return True
