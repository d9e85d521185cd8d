# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Numbers of entries as codes, and codes as words of a page, in the kernel that encodes.

Sums, products and quotients are those of plain torch, so codes are too, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millpond.kernels.gpu.packed import FIRST_TABLE, FP8, LANES
from millpond.kernels.packed.groups import MAX_E4M3
from millpond.kernels.packed.layout import RUN

BLOCK = tl.constexpr(RUN)  #: slots that are worked on at once: no word of codes has more of them
LARGEST_E4M3 = tl.constexpr(MAX_E4M3)
TO_WHOLE = tl.constexpr(12_582_912.0)  #: 3/2 of 2^23: of what is added to it whole numbers stay, the nearest ones


@triton.jit
def numbers_of(
    source,
    row_stride,
    row,
    there,
    channel,
    inside,
    position,
    kept,
    balance,
    turns,
    turn_cos,
    turn_sin,
    n_turns,
    DIM: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
    HAS_BALANCE: tl.constexpr,
    HAS_ROPE: tl.constexpr,
):
    """Return numbers (slots, groups, members) float32 as they are stored.

    They are 0 in slots that are not `there`. row, there and position are (slots,), channel and inside (groups,
    members).
    """
    ok = there[:, None, None] & inside[None, :, :]
    taken = channel
    if HAS_CHANNELS:
        taken = tl.load(kept + channel, mask=inside, other=0)
    at_row = source + (row * row_stride)[:, None, None]
    x = tl.load(at_row + taken[None, :, :], mask=ok, other=0.0).to(tl.float32)
    if HAS_BALANCE:
        x = tl.div_rn(x, tl.load(balance + channel, mask=inside, other=1.0)[None, :, :])
    if HAS_ROPE:
        partner = tl.load(turns + channel, mask=inside, other=-1)
        pair = tl.load(turns + DIM + channel, mask=inside, other=0)
        sign = tl.load(turns + 2 * DIM + channel, mask=inside, other=0).to(tl.float32)[None, :, :]
        turning = ok & (partner >= 0)[None, :, :]
        other = tl.load(at_row + partner[None, :, :], mask=turning, other=0.0).to(tl.float32)
        at = tl.maximum(position, 0).to(tl.int64)[:, None, None] * n_turns + pair[None, :, :]
        cos = tl.load(turn_cos + at, mask=turning, other=1.0)
        sin = tl.load(turn_sin + at, mask=turning, other=0.0)
        norm = cos * cos + sin * sin
        back = x * tl.div_rn(cos, norm) + sign * (other * tl.div_rn(sin, norm))
        x = tl.where(turning, back, x)
    return x


@triton.jit
def e4m3_of(x):
    """Return the code (int32) nearest to numbers of at most 448; of two the even one."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = ((tl.abs(x) * 512.0 + TO_WHOLE) - TO_WHOLE).to(tl.int32)
    return tl.where(size < (121 << 23), small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def bfloat16_of(x):
    """Return the bits (int16) of the nearest bfloat16, of two the even one."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, nearest).to(tl.int16)


@triton.jit
def code_of(x, scale, zero, cuts, FORMAT: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Return codes (int32) of numbers whose group has this scale and zero."""
    inverse = tl.where(scale > 0, tl.div_rn(1.0 + tl.zeros_like(scale), tl.where(scale > 0, scale, 1.0)), 0.0)
    if FORMAT == FP8:
        return e4m3_of(tl.minimum(tl.maximum(x * inverse, -LARGEST_E4M3), LARGEST_E4M3))
    elif FORMAT >= FIRST_TABLE:
        y = (x - zero) * inverse
        code = tl.zeros_like(y).to(tl.int32)
        for cut in tl.static_range((1 << BITS) - 1):
            code += (y > tl.load(cuts + cut)).to(tl.int32)
        return code
    elif SYMMETRIC:
        half: tl.constexpr = 1 << (BITS - 1)
        y = tl.minimum(tl.maximum(x * inverse, 1.0 - half), half - 1.0)
        return ((y + TO_WHOLE) - TO_WHOLE).to(tl.int32) + half
    else:
        y = tl.minimum(tl.maximum((x - zero) * inverse, 0.0), (1 << BITS) - 1.0)
        return ((y + TO_WHOLE) - TO_WHOLE).to(tl.int32)


@triton.jit
def put_codes(
    page,
    AT: tl.constexpr,
    code,
    slot,
    there,
    channel,
    inside,
    IS_KEY: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Store codes (BLOCK, groups, members) of BITS bits as words.

    Those of other slots in the same words stay; codes of slots that are not `there`, and of channels that are not
    `inside`, are 0.
    """
    PER: tl.constexpr = 32 // BITS
    GROUPS: tl.constexpr = code.shape[1]
    MEMBERS: tl.constexpr = code.shape[2]
    e = tl.arange(0, PER)
    shift = BITS * (e // 2) + 16 * (e % 2)
    words = (page + AT).to(tl.pointer_type(tl.int32))
    if IS_KEY:  # lanes are slots
        DEPTH: tl.constexpr = (DIM + PER - 1) // PER
        split = tl.reshape(code, (BLOCK, GROUPS, MEMBERS // PER, PER))
        word = tl.sum(split << shift[None, None, None, :], 3)
        first = tl.min(tl.reshape(channel, (GROUPS, MEMBERS // PER, PER)), 2)
        held = tl.max(tl.reshape(inside.to(tl.int32), (GROUPS, MEMBERS // PER, PER)), 2) > 0
        at = (slot // LANES * DEPTH)[:, None, None] + (first // PER)[None, :, :]
        at = at * LANES + (slot % LANES)[:, None, None]
        tl.store(words + at, word, mask=there[:, None, None] & held[None, :, :])
    else:  # lanes are channels
        split = tl.reshape(code, (BLOCK // PER, PER, GROUPS, MEMBERS))
        word = tl.sum(split << shift[None, :, None, None], 1)
        others = tl.where(there, 0, (1 << BITS) - 1)
        stays = tl.sum(tl.reshape(others, (BLOCK // PER, PER)) << shift[None, :], 1)
        depth = tl.min(tl.reshape(slot, (BLOCK // PER, PER)), 1) // PER
        at = (channel // LANES * (SLOTS // PER))[None, :, :] + depth[:, None, None]
        at = at * LANES + (channel % LANES)[None, :, :]
        held = inside[None, :, :]
        before = tl.load(words + at, mask=held & (stays != 0)[:, None, None], other=0)
        tl.store(words + at, word | (before & stays[:, None, None]), mask=held)


@triton.jit
def factors(low, high, FORMAT: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Return scale and zero of ranges, not yet rounded."""
    if FORMAT >= FIRST_TABLE:
        return (high - low) * 0.5, (high + low) * 0.5
    elif SYMMETRIC:
        most = tl.maximum(high, -low)
        return tl.div_rn(most, tl.zeros_like(most) + ((1 << (BITS - 1)) - 1.0)), tl.zeros_like(most)
    else:
        return tl.div_rn(high - low, tl.zeros_like(low) + ((1 << BITS) - 1.0)), low
