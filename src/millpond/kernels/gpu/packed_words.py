# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention over quantized pages that reads each word of codes once and scales queries and weights, not elements.

A product with codes is exact but for its float32 sum, so scales and zeros come outside it: those of a slot multiply its
logit and its weight, those of a channel multiply the query. Where queries are not scaled, and so not rounded again, the
codes of keys of 2 to 4 bits are 1 << bits more than they are, as they look in the fields of a bfloat16: what that adds
comes outside as well, and costs no instruction per code. Where the channels of a slot fall into several groups, the
rows of the weights are repeated for each, and a row counts in the channels of its group only; a product takes 16 rows
in any case.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from millpond.kernels.gpu.code_words import FP8, codes_of, factors_of, low_bits, settled
from millpond.kernels.gpu.common import INF, INTERPRET, KEYS, LOG2_E, LOG_MASSES, POSITIONS, block_of, logit2, tile_rows
from millpond.kernels.packed.layout import Format, PackedLayout, Side
from millpond.kernels.packed.regions import PackedRegions

#: The bits of two bfloat16 of 128. An argument of the kernel, so that the assembler keeps it in a register: with two
#: constants of its own an instruction that takes and sets bits becomes two.
TWO_128 = 0x43004300
#: Formats of codes that are numbers.
FORMATS = (Format.INT2, Format.INT3, Format.INT4, Format.INT8, Format.FP8)
#: Most registers of a thread of `attend_both`: five of its programs of two warps share a core, as of `attend_words`.
#: For int4 it would take 254, and four would share it; so it spills 40 bytes.
MAX_REGISTERS = 192
#: Most rows of weights, query heads of a group x groups of channels.
MAX_ROWS = 64


class Tuning(NamedTuple):
    """Sizes that change speed and not meaning."""

    block: int = 64  #: most slots per step, a power of two of at least 32; a page and a group may hold fewer
    warps: int = 2  #: of heads of up to 128 channels; twice as many for wider ones
    stages: int = 2


TUNING = Tuning()


def words_serve(packed: PackedRegions, group: int, dot: tl.dtype) -> bool:
    """Return whether `attend_words` serves these regions, for `group` query heads per KV head."""
    layout = packed.pages.layout
    sides = layout.key, layout.value
    whole = all(side.format in FORMATS and not side.n_extra and not side.fixed for side in sides)
    rows = _power(group) * _power(_groups(layout.value, layout.value_dim))
    return whole and packed.rope is None and rows <= MAX_ROWS and (dot == tl.bfloat16 or INTERPRET)


def word_shapes(layout: PackedLayout, group: int, split: int) -> dict[str, Any]:
    """Return the constants that only `attend_words` has."""
    spans = layout.key.group if layout.key.by_channel and layout.key.format.grouped else layout.slots
    value_groups = _groups(layout.value, layout.value_dim)
    return {
        "GROUP_SPAN": _power(group),
        "ROWS_BLOCK": block_of(_power(group) * _power(value_groups)),
        "BLOCK": min(TUNING.block, layout.slots, spans & -spans, split),
    }


def word_launch(layout: PackedLayout, both: bool) -> dict[str, int]:
    """Return how `attend_words` is compiled, or `attend_both`."""
    wide = max(layout.key_dim, layout.value_dim) > 128
    limit = {"maxnreg": MAX_REGISTERS} if both and not wide else {}
    return {"num_warps": 2 * TUNING.warps if wide else TUNING.warps, "num_stages": TUNING.stages, **limit}


def _groups(side: Side, dim: int) -> int:
    return dim // side.group if side.group and side.format.grouped and not side.by_channel else 1


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


@triton.jit(do_not_specialize=["n_arenas", "n_splits", "first_split", "before", "window", "two_128"])
def attend_words(
    q,
    q_s,
    q_h,
    bases,
    n_arenas,
    table,
    table_stride,
    lens,
    q_pos,
    part_out,
    part_max,
    part_sum,
    logits,
    n_splits,
    first_split,
    before,
    channels,
    balance,
    scale,
    softcap,
    window,
    two_128,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_SPAN: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_BITS: tl.constexpr,
    K_CODES: tl.constexpr,
    K_TOP: tl.constexpr,
    K_SCALES: tl.constexpr,
    K_ZEROS: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_BY_CHANNEL: tl.constexpr,
    K_MEANS: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_BITS: tl.constexpr,
    V_CODES: tl.constexpr,
    V_TOP: tl.constexpr,
    V_SCALES: tl.constexpr,
    V_ZEROS: tl.constexpr,
    V_GROUP: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    DOT: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
    HAS_BALANCE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    KEEP_LOGITS: tl.constexpr,
):
    """Compute what `attend_packed` does, for codes that are numbers.

    The first `before` programs of each region do something else. BLOCK slots are in one page, and in one group where
    keys are grouped by channel. Row `part * GROUP_SPAN + g` of the
    queries is query head g, for group `part` of the value channels.
    """
    two_128 = two_128.to(tl.uint32)
    SLOTS: tl.constexpr = 1 << LOG_SLOTS
    K_PER: tl.constexpr = 32 // low_bits(K_BITS)
    V_PER: tl.constexpr = 32 // low_bits(V_BITS)
    K_RAISED: tl.constexpr = K_FORMAT != FP8 and K_BITS < 8 and not K_BY_CHANNEL
    # what zeros get back: where `codes_of` has its zero, less that of the code
    K_MIDDLE: tl.constexpr = ((1 << (K_BITS - 1)) if K_ZEROS >= 0 else 0) - (3 << (K_BITS - 1) if K_RAISED else 0)
    V_MIDDLE: tl.constexpr = (1 << (V_BITS - 1)) if V_ZEROS >= 0 else 0
    r = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1) - before
    begin = split * SPLIT
    s = r // HEADS
    here = tl.load(q_pos + s)
    n = tl.load(lens + r)
    if here < 0 or begin >= n:
        return
    end = tl.minimum(n, begin + SPLIT)
    row = tl.arange(0, ROWS_BLOCK)
    g = row % GROUP_SPAN
    part = row // GROUP_SPAN
    row_ok = (g < GROUP) & (part * V_GROUP < VALUE_DIM)
    d = tl.arange(0, KEY_BLOCK)
    e = tl.arange(0, VALUE_BLOCK)
    head = (r % HEADS) * GROUP + g
    q_channel = d
    if HAS_CHANNELS:
        q_channel = tl.load(channels + r * KEY_DIM + d, mask=d < KEY_DIM, other=0)
    q_mask = row_ok[:, None] & (d < KEY_DIM)[None, :]
    q_tile = tl.load(q + s * q_s + head[:, None] * q_h + q_channel[None, :], mask=q_mask, other=0.0)  # (M, K)
    if HAS_BALANCE:
        factor = tl.load(balance + r * KEY_DIM + d, mask=d < KEY_DIM, other=0.0)
        q_tile = q_tile.to(tl.float32) * factor[None, :]
    q_tile = q_tile.to(DOT)
    q_wide = settled(q_tile.to(tl.float32))
    top = tl.full([ROWS_BLOCK], -INF, tl.float32)
    total = tl.zeros([ROWS_BLOCK, BLOCK], tl.float32)  # added up over slots at the end, as `beside` is
    beside = tl.zeros([ROWS_BLOCK, BLOCK], tl.float32)  # what zeros add to all channels of a row
    acc = tl.zeros([ROWS_BLOCK, VALUE_BLOCK], tl.float32)
    one = tl.zeros([1], tl.int32)
    same = tl.zeros([BLOCK], tl.int32)
    table_row = table + r * table_stride
    logit_rows = logits + (r * GROUP + g) * (n_splits * SPLIT) + first_split * SPLIT
    for first in range(begin, end, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        ok = slot < n
        at = tile_rows(bases, n_arenas, POSITIONS, table_row, first, slot, ok, LOG_SLOTS, LOG_PAGES, BLOCK, 1, tl.int32)
        position = tl.load(at, mask=ok, other=-1)
        visible = position >= 0
        if HAS_WINDOW:
            visible = visible & (here - position < window)
        number = tl.load(table_row + (first >> LOG_SLOTS))
        base = tl.load(bases + KEYS * n_arenas + (number >> LOG_PAGES))
        page = tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 16)
        page += (number & ((1 << LOG_PAGES) - 1)).to(tl.int64) * PAGE_BYTES
        start = tl.multiple_of(first & (SLOTS - 1), BLOCK)
        inside = start + tl.arange(0, BLOCK)
        k_word = tl.arange(0, KEY_BLOCK // K_PER)
        k = codes_of(
            page,
            two_128,
            K_CODES,
            K_TOP,
            KEY_DIM // K_PER,
            k_word,
            inside,
            KEY_DIM < KEY_BLOCK,
            (k_word < KEY_DIM // K_PER)[:, None],
            K_FORMAT,
            K_BITS,
            K_RAISED,
            DOT,
        )  # (K, BLOCK)
        if K_FORMAT == FP8:
            product = tl.dot(q_tile, k, input_precision="ieee")
            product *= tl.load((page + K_SCALES).to(tl.pointer_type(tl.float32)) + same)[None, :]
        elif K_BY_CHANNEL:
            at_channel = one + start // K_GROUP * KEY_DIM
            factor, zero = factors_of(page, K_SCALES, K_ZEROS, K_MIDDLE, at_channel, KEY_BLOCK, KEY_DIM, KEY_DIM)
            product = tl.dot(settled(q_wide * factor).to(DOT), k, input_precision="ieee")
            if K_ZEROS >= 0:
                product += tl.sum(q_wide * zero, 1)[:, None]
        else:
            product = tl.zeros([ROWS_BLOCK, BLOCK], tl.float32)
            for group in tl.static_range(KEY_DIM // K_GROUP):
                its_q = q_tile
                if K_GROUP < KEY_DIM:
                    its_q = tl.where((d // K_GROUP == group)[None, :], q_tile, 0.0)
                at_slot = one + group * SLOTS + start
                factor, zero = factors_of(page, K_SCALES, K_ZEROS, K_MIDDLE, at_slot, BLOCK, BLOCK, n - first)
                product += tl.dot(its_q, k, input_precision="ieee") * factor
                if K_ZEROS >= 0 or K_RAISED:
                    product += tl.sum(its_q.to(tl.float32), 1)[:, None] * zero
            if K_MEANS >= 0:
                means, _ = factors_of(page, K_MEANS, -1, 0, one, KEY_BLOCK, KEY_DIM, KEY_DIM)
                product += tl.sum(q_wide * means, 1)[:, None]
        x = logit2(product, scale, softcap, HAS_CAP)
        if HAS_MASSES:
            at = tile_rows(
                bases, n_arenas, LOG_MASSES, table_row, first, slot, ok, LOG_SLOTS, LOG_PAGES, BLOCK, 1, tl.float32
            )
            x += (tl.load(at, mask=ok, other=0.0) * LOG2_E)[None, :]
        x = tl.where(visible[None, :], x, -INF)
        if KEEP_LOGITS:
            tl.store(logit_rows[:, None] + slot[None, :], x, mask=(row < GROUP)[:, None] & ok[None, :])
        new_top = tl.maximum(top, tl.max(x, 1))
        finite = tl.where(new_top == -INF, 0.0, new_top)  # nothing visible so far: exp2(-inf - 0) = 0
        p = tl.exp2(x - finite[:, None])
        fade = tl.exp2(top - finite)
        top = new_top
        total = total * fade[:, None] + p
        if V_FORMAT == FP8:
            weights = (p * tl.load((page + V_SCALES).to(tl.pointer_type(tl.float32)) + same)[None, :]).to(DOT)
        else:
            if V_GROUP < VALUE_DIM:
                at_slot = tl.minimum(part, VALUE_DIM // V_GROUP - 1) * SLOTS + start
            else:
                at_slot = one + start
            factor, zero = factors_of(page, V_SCALES, V_ZEROS, V_MIDDLE, at_slot, BLOCK, BLOCK, n - first)
            weights = settled(p * factor).to(DOT)
            if V_ZEROS >= 0:
                beside = beside * fade[:, None] + p * zero
        v = codes_of(
            page,
            two_128,
            V_CODES,
            V_TOP,
            SLOTS // V_PER,
            start // V_PER + tl.arange(0, BLOCK // V_PER),
            e,
            VALUE_DIM < VALUE_BLOCK,
            (e < VALUE_DIM)[None, :],
            V_FORMAT,
            V_BITS,
            False,
            DOT,
        )  # (BLOCK, V)
        acc = tl.dot(weights, v, acc * fade[:, None], input_precision="ieee")
    acc += tl.sum(beside, 1)[:, None]
    to = (r * n_splits + first_split + split) * GROUP + g
    tl.store(part_max + to, top, mask=row < GROUP)
    tl.store(part_sum + to, tl.sum(total, 1), mask=row < GROUP)
    own = row_ok[:, None] & (e < VALUE_DIM)[None, :] & (part[:, None] == (e // V_GROUP)[None, :])
    tl.store(part_out + to[:, None] * VALUE_DIM + e[None, :], acc, mask=own)
