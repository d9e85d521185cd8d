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

from millpond.kernels.gpu.attend import attend
from millpond.kernels.gpu.common import INF, INTERPRET, KEYS, LOG2_E, LOG_MASSES, POSITIONS, block_of, logit2, tile_rows
from millpond.kernels.packed.layout import LANES as TILE_LANES
from millpond.kernels.packed.layout import Format, PackedLayout, Side
from millpond.kernels.packed.regions import PackedRegions

FP8 = tl.constexpr(int(Format.FP8))
LANES = tl.constexpr(TILE_LANES)
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


@triton.jit
def settled(x):
    """Return a tile (A, B) as it is.

    The compiler takes what is joined before a product for halves of wider codes, and reads the operands of the product
    in pieces; it does not look behind a sum, here of one number.
    """
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], 1)), 2)


@triton.constexpr_function
def low_bits(bits):
    """Return how many bits of a code lie in one word."""
    return 2 if bits == 3 else bits


@triton.jit
def moved(words, BY: tl.constexpr):
    """Return words with their bits BY places lower, or higher where that is negative."""
    if BY >= 0:
        return words >> BY
    else:
        return words << -BY


@triton.jit
def bits_of(words, tops, two_128, AT: tl.constexpr, LESS: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr):
    """Return code number AT of words as the 16 bits of a bfloat16.

    An integer of 8 bits is the sum of two, one of them LESS. `tops` have the third bits of codes of 3 bits.
    """
    UNIT: tl.constexpr = 0x10001 << max(7 - BITS, 0)
    pair = words >> (low_bits(BITS) * (AT // 2))  # two codes, 16 bits apart
    if FORMAT == FP8:
        # the fields of e4m3 in those of bfloat16, whose exponents are 120 more; NaN, which is never stored, gives 480
        pair = ((pair << 4) & 0x07F007F0) | ((pair << 8) & 0x80008000)
    elif LESS:
        pair = (~pair & 0x00800080) | 0xC300C300  # -256 where the first bit is 0, else -128
    elif BITS == 8:
        pair = (pair & 0x007F007F) | two_128  # 128 + the last 7 bits
    else:  # the first bits of the fraction of (1 << BITS) + the code
        lead = two_128 - (7 - BITS) * 0x00800080
        pair = moved(words, low_bits(BITS) * (AT // 2) - (7 - BITS)) & (((1 << low_bits(BITS)) - 1) * UNIT)
        if BITS == 3:
            pair |= moved(tops, AT // 2 - 6) & (4 * UNIT)
        pair |= lead
    if AT % 2 == 0:
        return pair & 0xFFFF
    else:
        return pair >> 16


@triton.jit
def spread(
    words,
    tops,
    two_128,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    LESS: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
):
    """Return `bits_of` codes FIRST, FIRST + STEP, .. of words in new last axes of 2."""
    if STEP * low_bits(BITS) == 32:
        return bits_of(words, tops, two_128, FIRST, LESS, FORMAT, BITS)
    else:
        even = spread(words, tops, two_128, FIRST, 2 * STEP, LESS, FORMAT, BITS)
        odd = spread(words, tops, two_128, FIRST + STEP, 2 * STEP, LESS, FORMAT, BITS)
        return tl.join(even, odd)


@triton.jit
def bfloat16s(words, tops, two_128, LESS: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr):
    """Return the bfloat16 of `bits_of` all codes of words (N, M), (N * codes of a word, M)."""
    bits = spread(words, tops, two_128, 0, 1, LESS, FORMAT, BITS)
    if BITS == 8:
        bits = tl.permute(bits, (0, 2, 3, 1))
    elif BITS == 4:
        bits = tl.permute(bits, (0, 2, 3, 4, 1))
    else:
        bits = tl.permute(bits, (0, 2, 3, 4, 5, 1))
    bits = settled(tl.reshape(bits, (words.shape[0] * (32 // low_bits(BITS)), words.shape[1])))
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def words_of(page, at: tl.constexpr, words: tl.constexpr, depth, across, MASKED: tl.constexpr, ok):
    """Return words depth (N,) of lanes across (M,), of `words` each, (N, M); 0 where not `ok`."""
    pointer = (page + at).to(tl.pointer_type(tl.uint32))
    pointer += ((across // LANES * words)[None, :] + depth[:, None]) * LANES + (across % LANES)[None, :]
    if MASKED:
        return tl.load(pointer, mask=ok, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def codes_of(
    page,
    two_128,
    CODES: tl.constexpr,
    TOP: tl.constexpr,
    words: tl.constexpr,
    depth,
    across,
    MASKED: tl.constexpr,
    ok,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    RAISED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return what codes of a page stand for, unscaled and exact.

    Integers stand around 0, or if they are RAISED and have fewer than 8 bits, around 3/2 * (1 << BITS). They are all
    codes, in axis 0, of words depth (N,) of lanes across (M,), of `words` each.
    """
    loaded = words_of(page, CODES, words, depth, across, MASKED, ok)
    tops = loaded
    if BITS == 3:  # those of two words lie in one
        tops = words_of(page, TOP, (words + 1) // 2, depth // 2, across, MASKED, ok) >> (8 * (depth % 2))[:, None]
    codes = bfloat16s(loaded, tops, two_128, False, FORMAT, BITS).to(DOT)
    if FORMAT == FP8:
        return codes * 1.329227995784916e36
    elif BITS == 8:
        return codes + bfloat16s(loaded, tops, two_128, True, FORMAT, BITS).to(DOT)
    elif RAISED:
        return codes
    else:
        return codes - 3.0 * (1 << (BITS - 1))


@triton.jit
def float16s(word, held):
    """Return (M, N) words of two float16 as (M, 2 * N) float32, 0 from column `held` on."""
    N: tl.constexpr = 2 * word.shape[1]
    bits = tl.reshape(tl.join(word & 0xFFFF, word >> 16), (word.shape[0], N))
    bits = tl.where((tl.arange(0, N) < held)[None, :], bits, 0)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def factors_of(
    page,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
    first,
    N: tl.constexpr,
    THERE: tl.constexpr,
    held,
):
    """Return scales and zeros, the latter with MIDDLE scales, each (M, N) float32, of groups of a page.

    They are groups `first` (M,), which are even, and N - 1 after. The page has THERE of N, and from column `held` on
    all is 0. Read as words and together: the compiler loads ahead what a product needs, 4 bytes or more at once.
    """
    n = tl.arange(0, N // 2)
    pointer = (page + SCALES).to(tl.pointer_type(tl.uint32)) + (first // 2)[:, None] + n[None, :]
    if ZEROS < 0:
        if THERE < N:
            word = tl.load(pointer, mask=(n < THERE // 2)[None, :], other=0)
        else:
            word = tl.load(pointer)
        scales = float16s(word, held)
        return scales, MIDDLE * scales
    else:
        pointers = pointer[:, :, None] + (tl.arange(0, 2) * ((ZEROS - SCALES) // 4))[None, None, :]
        if THERE < N:
            words = tl.load(pointers, mask=(n < THERE // 2)[None, :, None], other=0)
        else:
            words = tl.load(pointers)
        scale_word, zero_word = tl.split(words)
        scales = float16s(scale_word, held)
        return scales, float16s(zero_word, held) + MIDDLE * scales


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
    """Compute what `attend_packed` does, for codes that are numbers, after `before` programs of each region.

    BLOCK slots are in one page, and in one group where keys are grouped by channel. Row `part * GROUP_SPAN + g` of the
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


@triton.jit(do_not_specialize=["n_arenas", "n_splits", "first_split", "before", "window", "two_128", "plain_arenas"])
def attend_both(
    plain_bases,
    plain_arenas,
    plain_table,
    plain_stride,
    plain_lens,
    seen,
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
    GROUP_BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
    PLAIN_KEY_DIM: tl.constexpr,
    PLAIN_KEY_BLOCK: tl.constexpr,
    PLAIN_LOG_SLOTS: tl.constexpr,
    PLAIN_LOG_PAGES: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr,
    PLAIN_MASSES: tl.constexpr,
):
    """Run `attend` of the plain part in the first programs of a region, `before` of them, and `attend_words` in others.

    The plain part is short and waits for memory; beside the codes it takes no time of its own.
    """
    if tl.program_id(1) < before:
        attend(
            q,
            q_s,
            q_h,
            q,
            0,
            0,
            q,
            0,
            q,
            0,
            q,
            q,
            plain_bases,
            plain_arenas,
            plain_table,
            plain_stride,
            plain_lens,
            q_pos,
            part_out,
            part_max,
            part_sum,
            logits,
            n_splits,
            seen,
            scale,
            softcap,
            window,
            HEADS,
            GROUP,
            GROUP_BLOCK,
            PLAIN_KEY_DIM,
            VALUE_DIM,
            PLAIN_KEY_BLOCK,
            VALUE_BLOCK,
            PLAIN_LOG_SLOTS,
            PLAIN_LOG_PAGES,
            TYPE,
            DOT,
            SPLIT,
            PLAIN_BLOCK,
            HAS_CAP,
            HAS_WINDOW,
            PLAIN_MASSES,
            KEEP_LOGITS,
            0,
            tl.float32,
        )
        return
    attend_words(
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
        HEADS,
        GROUP,
        GROUP_SPAN,
        ROWS_BLOCK,
        KEY_DIM,
        VALUE_DIM,
        KEY_BLOCK,
        VALUE_BLOCK,
        K_FORMAT,
        K_BITS,
        K_CODES,
        K_TOP,
        K_SCALES,
        K_ZEROS,
        K_GROUP,
        K_BY_CHANNEL,
        K_MEANS,
        V_FORMAT,
        V_BITS,
        V_CODES,
        V_TOP,
        V_SCALES,
        V_ZEROS,
        V_GROUP,
        PAGE_BYTES,
        LOG_SLOTS,
        LOG_PAGES,
        DOT,
        SPLIT,
        BLOCK,
        HAS_CHANNELS,
        HAS_BALANCE,
        HAS_CAP,
        HAS_WINDOW,
        HAS_MASSES,
        KEEP_LOGITS,
    )
