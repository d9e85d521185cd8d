# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Keys and values to the bit planes of pages of the codec `transform`, and back, in Triton.

Back, one program makes a block of channels of a page. Forth, one kernel projects tokens, and one finds the codes of a
block of dimensions of a page and packs them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.kernels.gpu.common import TYPES, check, on_its_device, rows_of
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


@triton.jit(do_not_specialize=["n", "n_rows", "d"])
def _project(
    x, x_n, mean, rows, matrix, z, n, n_rows, d, TOKEN_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Write some rows of matrix (x - mean) of a block of tokens."""
    token = tl.program_id(0).to(tl.int64) * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
    i = tl.program_id(1) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    there, inside = i < n_rows, token < n
    row = tl.load(rows + i, mask=there, other=0)
    sums = tl.zeros([TOKEN_BLOCK, ROW_BLOCK], tl.float32)
    for begin in range(0, d, STEP):
        channel = begin + tl.arange(0, STEP)
        of_both = inside[:, None] & (channel < d)[None, :]
        left = tl.load(x + token[:, None] * x_n + channel[None, :], mask=of_both, other=0.0).to(tl.float32)
        left = tl.where(of_both, left - tl.load(mean + channel, mask=channel < d, other=0.0)[None, :], 0.0)
        of_both = (channel < d)[:, None] & there[None, :]
        right = tl.load(matrix + row[None, :] * d + channel[:, None], mask=of_both, other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    tl.store(z + token[:, None] * n_rows + i[None, :], sums, mask=inside[:, None] & there[None, :])


@triton.jit(do_not_specialize=["n"])
def _encode(
    z, z_n, columns, rows, widths, planes, cut_at, shift, scale, cuts, words, page_words, n, DIMENSIONS: tl.constexpr
):
    """Write the planes of some dimensions of a page."""
    page = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, TOKENS)
    i = tl.program_id(1) * DIMENSIONS + tl.arange(0, DIMENSIONS)
    there = i < n
    row = tl.load(rows + i, mask=there, other=0)
    width = tl.load(widths + i, mask=there, other=0)
    first = cuts + tl.load(cut_at + i, mask=there, other=0)
    column = tl.load(columns + i, mask=there, other=0)
    number = tl.load(z + (page * TOKENS + token)[:, None] * z_n + column[None, :], mask=there[None, :], other=0.0)
    away = number - tl.load(shift + row, mask=there, other=0.0)[None, :]
    number = tl.div_rn(away, tl.zeros_like(away) + tl.load(scale + row, mask=there, other=1.0)[None, :])
    code = tl.zeros([TOKENS, DIMENSIONS], tl.int32)
    for step in tl.static_range(BITS):
        bit = BITS - 1 - step
        higher = code | (1 << bit)
        open = (bit < width) & there
        cut = tl.load(first[None, :] + higher - 1, mask=open[None, :], other=float("inf"))
        code = tl.where(open[None, :] & (cut < number), higher, code)
    at = words + page * page_words + tl.load(planes + i, mask=there, other=0)
    for bit in tl.static_range(BITS):
        plane = tl.sum(((code >> bit) & 1).to(tl.uint32) << token[:, None].to(tl.uint32), 0)
        tl.store(at + bit, plane.to(tl.int32, bitcast=True), mask=there & (bit < width))


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


#: Tokens, rows and channels that a program of `_project` multiplies at a time.
TOKEN_BLOCK, ROW_BLOCK, STEP = 64, 64, 32


@on_its_device
def project(x: Tensor, mean: Tensor, matrix: Tensor, rows: Tensor) -> Tensor:
    """Return some rows (n,) of matrix (x - mean), (tokens, n) float32, for x (tokens, d).

    A product is fused with its sum, over the channels in their order.
    """
    check(x.device, x.dtype)
    x = rows_of(x)
    z = torch.empty((len(x), len(rows)), dtype=torch.float32, device=x.device)
    if z.numel():
        _project[(triton.cdiv(len(x), TOKEN_BLOCK), triton.cdiv(len(rows), ROW_BLOCK))](
            x,
            x.stride(0),
            mean,
            rows,
            matrix,
            z,
            len(x),
            len(rows),
            x.shape[1],
            TOKEN_BLOCK=TOKEN_BLOCK,
            ROW_BLOCK=ROW_BLOCK,
            STEP=STEP,
        )
    return z


@on_its_device
def encode_planes(z: Tensor, coded: CodedDimensions, words: Tensor, words_before: int) -> None:
    """Write the planes of the dimensions that have bits into pages.

    Args:
        z: Numbers of all dimensions, (32 P, rows) float32, or of those that have bits alone.
        coded: How the dimensions are coded; its `levels` are the cuts of each table, with any number behind them.
        words: (P, words) int32, written.
        words_before: Words of a page before these planes.
    """
    check(z.device, z.dtype)
    places, z = _Places.of(coded, words_before), rows_of(z)
    n = len(places.rows)
    if not n or not len(words):
        return
    columns = places.rows if z.shape[1] == len(coded.bits) else torch.arange(n, device=z.device)
    _encode[(len(words), triton.cdiv(n, DIMENSIONS))](
        z,
        z.stride(0),
        columns,
        *places,
        coded.shift,
        coded.scale,
        coded.levels,
        words,
        words.shape[1],
        n,
        DIMENSIONS=DIMENSIONS,
    )
