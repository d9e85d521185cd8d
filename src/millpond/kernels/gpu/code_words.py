# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Words of codes in a page, and the words of their scales and zeros, as numbers of the kernels that multiply them."""

from __future__ import annotations

import triton
import triton.language as tl

from millpond.kernels.packed.layout import LANES as TILE_LANES
from millpond.kernels.packed.layout import Format

FP8 = tl.constexpr(int(Format.FP8))
LANES = tl.constexpr(TILE_LANES)


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
    """Return scales and zeros, each (M, N) float32, of groups of a page.

    MIDDLE scales are added to the zeros. They are groups `first` (M,), which are even, and N - 1 after. The page has
    THERE of N, and from column `held` on all is 0. Read as words and together: the compiler loads ahead what a product
    needs, 4 bytes or more at once.
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
