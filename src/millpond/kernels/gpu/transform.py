# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Pages of the codec `transform` back to keys and values, in Triton: one program per page and block of channels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.kernels.gpu.common import TYPES, check, on_its_device
from millpond.kernels.transform_args import HEADER_BYTES, MOST_BITS, BackTransform, BackTransforms, CodedDimensions
from millpond.kernels.transform_args import TOKENS as PAGE_TOKENS

TOKENS = tl.constexpr(PAGE_TOKENS)
BITS = tl.constexpr(MOST_BITS)
#: Dimensions and channels that a program multiplies at a time.
DIMENSIONS, CHANNELS = 32, 64


@triton.jit(do_not_specialize=["n", "d"])
def _decode(
    words,
    page_words,
    rows,
    widths,
    planes,
    level_at,
    shift,
    scale,
    levels,
    matrix,
    start,
    out,
    n,
    d,
    DIMENSIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Write some channels of a page's tokens; only dimensions that have bits are given."""
    page = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    token = tl.arange(0, TOKENS)
    inside = channel < d
    first = tl.load(start + channel, mask=inside, other=0.0)
    sums = tl.zeros([TOKENS, CHANNELS], tl.float32) + first[None, :]
    for begin in range(0, n, DIMENSIONS):
        i = begin + tl.arange(0, DIMENSIONS)
        there = i < n
        row = tl.load(rows + i, mask=there, other=0)
        width = tl.load(widths + i, mask=there, other=0)
        at = words + page * page_words + tl.load(planes + i, mask=there, other=0)
        code = tl.zeros([TOKENS, DIMENSIONS], tl.int32)
        for bit in tl.static_range(BITS):
            plane = tl.load(at + bit, mask=there & (bit < width), other=0)
            code |= ((plane[None, :] >> token[:, None]) & 1) << bit
        its_levels = levels + tl.load(level_at + i, mask=there, other=0)
        level = tl.load(its_levels[None, :] + code, mask=there[None, :], other=0.0)
        z = level * tl.load(scale + row, mask=there, other=0.0)[None, :]
        z += tl.load(shift + row, mask=there, other=0.0)[None, :]
        mask = there[:, None] & inside[None, :]
        right = tl.load(matrix + row[:, None] * d + channel[None, :], mask=mask, other=0.0)
        sums = tl.dot(z, right, sums, input_precision="ieee")
    to = out + (page * TOKENS + token)[:, None] * d + channel[None, :]
    tl.store(to, sums.to(TYPE), mask=inside[None, :])


class _Places(NamedTuple):
    """Places of the dimensions that have bits, (n,) int64 each.

    Attributes:
        rows: Rows of the matrix.
        widths: Bits.
        planes: First word in a page.
        level_at: First level of the table.
    """

    rows: Tensor
    widths: Tensor
    planes: Tensor
    level_at: Tensor

    @classmethod
    def of(cls, coded: CodedDimensions, words_before: int) -> _Places:
        bits = coded.bits.long()
        rows = bits.nonzero()[:, 0]
        widths = bits[rows]
        level_at = (1 << widths) - 2
        if coded.sets is not None:
            level_at += coded.sets[rows].long() * coded.levels.shape[1]
        return cls(rows, widths, widths.cumsum(0) - widths + words_before, level_at)


def decode_pages(sides: BackTransforms, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and values of checked pages (P, bytes), (32 P, d) each.

    They are on the device of the transform.
    """
    device = sides[0].mean.device
    check(device, dtype)
    words = pages.to(device).contiguous().view(torch.int32)
    before, outs = HEADER_BYTES // 4, []
    for side in sides:
        outs.append(_decoded(side.mean, side, words, before, dtype))
        before += int(side.coded.bits.sum())
    return outs[0], outs[1]


@on_its_device
def _decoded(mean: Tensor, side: BackTransform, words: Tensor, words_before: int, dtype: torch.dtype) -> Tensor:
    coded, matrix = side.coded, side.matrix
    places = _Places.of(coded, words_before)
    constant = (coded.bits == 0).nonzero()[:, 0]
    start = torch.addmv(mean, matrix[constant].T, coded.shift[constant])
    out = torch.empty((len(words) * PAGE_TOKENS, len(mean)), dtype=dtype, device=mean.device)
    if not out.numel():
        return out
    _decode[(len(words), triton.cdiv(len(mean), CHANNELS))](
        words,
        words.shape[1],
        *places,
        coded.shift,
        coded.scale,
        coded.levels,
        matrix,
        start,
        out,
        len(places.rows),
        len(mean),
        DIMENSIONS=DIMENSIONS,
        CHANNELS=CHANNELS,
        TYPE=TYPES[dtype],
    )
    return out
