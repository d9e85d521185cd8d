# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Draw of a token from each row of probabilities in Triton: top-k, top-p and min-p, and the race of what remains.

A row is never sorted: the least probability that a filter keeps is found by halving the range of its bits, and each of
the at most 31 looks is one sum over the row. So a step's tokens are drawn without the host, whatever the rows hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.kernels.gpu.common import check, on_its_device, rows_of

#: Probabilities that a program reads at a time.
BLOCK = 2048

# constants of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers
_STEP = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_SECOND = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def _shifted(z, N: tl.constexpr):
    """Return int64 `z` shifted right by N bits, zeros coming in."""
    return (z >> N) & ((1 << (64 - N)) - 1)


@triton.jit
def _uniform(key, ids):
    """Return float64 numbers inside (0, 1) with 52 random bits of a key and ids, int64."""
    z = key + (ids + 1) * _STEP
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    z = z ^ _shifted(z, 31)
    return (_shifted(z, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit
def _above(row, size, limit, floor, BLOCK: tl.constexpr):
    """Return the number and the sum (float64) of probabilities above `limit`.

    Those below `floor` do not count.
    """
    count = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        p = tl.load(row + column, mask=column < size, other=0.0)
        counted = (p > limit) & (p >= floor)
        count += counted.to(tl.int32)
        total += tl.where(counted, p, 0.0).to(tl.float64)
    return tl.sum(count), tl.sum(total)


@triton.jit
def _draw(probs, top_ks, top_ps, min_ps, keys, tokens, size, row_stride, BLOCK: tl.constexpr, HALVINGS: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = probs + number * row_stride
    top_k, top_p = tl.load(top_ks + number), tl.load(top_ps + number)
    highest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(row + column, mask=column < size, other=0.0))
    likeliest = tl.max(highest)
    by_rank = likeliest * 0.0
    if (top_k > 0) & (top_k < size):  # the least x with fewer than k above it
        low, high = tl.zeros([], tl.int32), likeliest.to(tl.int32, bitcast=True)
        for _ in range(HALVINGS):
            middle = low + (high - low) // 2
            count, total = _above(row, size, middle.to(tl.float32, bitcast=True), 0.0, BLOCK)
            enough = count < top_k
            low, high = tl.where(enough, low, tl.minimum(middle + 1, high)), tl.where(enough, middle, high)
        by_rank = high.to(tl.float32, bitcast=True)
    least = by_rank
    if top_p < 1:  # the least x with a smaller share than p above it
        mass = top_p
        if top_k > 0:
            count, total = _above(row, size, -1.0, by_rank, BLOCK)
            mass = top_p * total
        low, high = tl.zeros([], tl.int32), likeliest.to(tl.int32, bitcast=True)
        for _ in range(HALVINGS):
            middle = low + (high - low) // 2
            count, total = _above(row, size, middle.to(tl.float32, bitcast=True), by_rank, BLOCK)
            enough = total < mass
            low, high = tl.where(enough, low, tl.minimum(middle + 1, high)), tl.where(enough, middle, high)
        least = tl.maximum(by_rank, high.to(tl.float32, bitcast=True))
    least = tl.maximum(least, tl.load(min_ps + number) * likeliest)
    key = tl.load(keys + number)
    fastest = tl.full([BLOCK], -1.0, tl.float64)
    winner = tl.zeros([BLOCK], tl.int64)
    for first in range(0, size, BLOCK):
        column = (first + tl.arange(0, BLOCK)).to(tl.int64)
        p = tl.load(row + column, mask=column < size, other=0.0)
        speed = tl.where(p >= least, p, 0.0).to(tl.float64) / -tl.log(_uniform(key, column))
        faster = (speed > fastest) & (column < size)
        fastest, winner = tl.where(faster, speed, fastest), tl.where(faster, column, winner)
    first_of_all = tl.where(fastest == tl.max(fastest), winner, size)
    tl.store(tokens + number, tl.min(first_of_all))


@on_its_device
def draw(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor) -> Tensor:
    """Return the token (S,) int64 that is drawn from each row.

    The filters and the race are those of `millpond.engine.sampling.token_choice.choose`.

    Args:
        probs: (S, V) float32, at least 0, each row with one above 0; a row of NaN gets any token.
        top_k: (S,) int64, tokens that are kept; 0 keeps all.
        top_p: (S,) float64, share of what top-k keeps; 1 keeps all.
        min_p: (S,) float32, share of the highest probability; 0 keeps all.
        keys: (S,) int64, random bits of each row's draw.

    Raises:
        OptionError: tensors that are not on a CUDA device.
    """
    check(probs.device, probs.dtype)
    assert probs.dtype is torch.float32, "probabilities of a softmax in float32"
    probs = rows_of(probs)
    rows, size = probs.shape
    tokens = torch.zeros(rows, dtype=torch.int64, device=probs.device)
    # the bits of 1.0 have 30 digits
    _draw[(rows,)](
        probs, top_k, top_p, min_p, keys, tokens, size, probs.stride(0), BLOCK=BLOCK, HALVINGS=31, num_warps=8
    )
    return tokens
