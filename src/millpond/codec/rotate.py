"""Hadamard rotation: spreads large channels over all, so that few bits per slot suffice.

Attention does not change: (q H) . (k H) = q . k, and the values' rotation is undone on the output. The cache rotates
queries, keys and values as they come in and the output as it leaves, so plain and packed pages hold the same numbers.
Rotation of caches: QuaRot (arXiv:2404.00456). A head_dim that is no power of two (80, 96) is rotated in blocks of the
largest power of two that divides it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from millpond.errors import OptionError

#: Blocks smaller than this spread too little to be worth it.
SMALLEST_BLOCK = 8
#: Devices that compute in float64 slowly or not at all, and promise no equal bits.
ACCELERATORS = ("cuda", "mps", "xpu")


def block_size(dim: int) -> int:
    """Return the size of the blocks in which `dim` channels are rotated.

    Raises:
        OptionError: the largest power of two that divides dim is too small.
    """
    block = dim & -dim
    if block < SMALLEST_BLOCK:
        raise OptionError(
            f"head_dim={dim} cannot be rotated: it must be divisible by {SMALLEST_BLOCK}; use a codec without rotation"
        )
    return block


@cache
def hadamard(dim: int) -> Tensor:
    """Return the orthonormal block-diagonal Hadamard matrix (dim, dim) float32.

    It is symmetric, and so its own inverse.
    """
    block = block_size(dim)
    h = torch.ones(1, 1)
    while len(h) < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)]) / 2**0.5
    return torch.kron(torch.eye(dim // block), h)


#: Rows that are rotated together: they stay in the cache of a core.
ROWS = 2048


def rotate(x: Tensor) -> Tensor:
    """Return x (..., dim) times the Hadamard matrix, in x's dtype.

    Rotating twice gives x back. On a CPU a row has the same bits, and so the same codes, whatever else is rotated with
    it: sums of numbers of 8 or 11 bits are exact in float64, and a product of matrices in float32 promises no such
    thing.
    """
    if x.device.type in ACCELERATORS:
        product: Tensor = (x.float() @ _hadamard_on(x.shape[-1], x.device)).to(x.dtype)
        return product
    if x.dtype in (torch.bfloat16, torch.float16):
        block = block_size(x.shape[-1])
        exact: Tensor = ((x.double() @ _signs(x.shape[-1]).to(x.device)) * block**-0.5).to(x.dtype)
        return exact
    return _transformed(x)


@cache
def _hadamard_on(dim: int, device: torch.device) -> Tensor:
    """Return `hadamard(dim)` in the memory of a device, where it stays, also for autograd."""
    with torch.inference_mode(False):
        return hadamard(dim).to(device)


@cache
def _signs(dim: int) -> Tensor:
    """Return the Hadamard matrix (dim, dim) float64 of 1 and -1, and 0 between blocks."""
    return hadamard(dim).sign().double()


def _transformed(x: Tensor) -> Tensor:
    """Return x times the Hadamard matrix by the fast Walsh-Hadamard transform.

    Sums and differences of halves are taken log2(dim) times.
    """
    block = block_size(x.shape[-1])
    flat = x.float().reshape(-1, block)
    rotated = torch.empty_like(flat)
    for begin in range(0, len(flat), ROWS):
        # a copy, channels first: whole rows are added
        rows = flat[begin : begin + ROWS].t().clone(memory_format=torch.contiguous_format)
        other, half = torch.empty_like(rows), 1
        while half < block:
            (first, second), (sums, differences) = (
                part.view(-1, 2, half, rows.shape[1]).unbind(1) for part in (rows, other)
            )
            torch.add(first, second, out=sums)
            torch.sub(first, second, out=differences)
            rows, other, half = other, rows, 2 * half
        torch.mul(rows.t(), block**-0.5, out=rotated[begin : begin + ROWS])
    return rotated.reshape(x.shape).to(x.dtype)
