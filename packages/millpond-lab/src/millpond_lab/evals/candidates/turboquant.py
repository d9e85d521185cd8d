"""TurboQuant's codes as a plain reference: entries are stored as the codes would give them back, in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as cached
from typing import Annotated

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.hf.grad_mode import no_autograd
from millpond.option_ranges import Range
from millpond_lab.evals.candidates.candidate import Candidate, OwnFormat, candidate
from millpond_lab.evals.decoding.batch import PromptBatch

#: Rounds of Lloyd's iteration, and points that stand for the normal distribution in it.
ROUNDS, POINTS = 400, 2**16
#: Bits of a norm, and seed of the random matrices.
NORM_BITS, SEED = 16, 0


@cached
def centroids(bits: int) -> Tensor:
    """The levels (2^bits,) of least squared error for a standard normal number, ascending, float64 (Lloyd, Max)."""
    places = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    points = math.sqrt(2) * torch.erfinv(2 * places - 1)
    levels = points[POINTS >> (bits + 1) :: POINTS >> bits].clone()
    for _ in range(ROUNDS):
        nearest = torch.bucketize(points, (levels[1:] + levels[:-1]) / 2)
        sums = torch.zeros_like(levels).index_add_(0, nearest, points)
        levels = sums / torch.bincount(nearest, minlength=len(levels))
        levels = (levels - levels.flip(0)) / 2  # as the points lie
    return levels


@cached
def rotation(dim: int) -> Tensor:
    """A random orthogonal matrix (dim, dim) float64, the same for all layers and heads."""
    gaussian = torch.randn(dim, dim, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    signed: Tensor = q * r.diagonal().sign()
    return signed


@cached
def projection(dim: int) -> Tensor:
    """The Gaussian matrix (dim, dim) float64 of the signs of residuals."""
    return torch.randn(dim, dim, generator=torch.Generator().manual_seed(SEED + 1), dtype=torch.float64)


def decoded(x: Tensor, bits: int) -> Tensor:
    """What codes of the least squared error give back of vectors x (..., d): TurboQuant, algorithm 1.

    x / |x| is rotated at random; each of its numbers, which are nearly normal with variance 1 / d, is rounded to the
    nearest of 2^bits centroids; the norm is stored beside them.
    """
    dim, norms = x.shape[-1], torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True)
    matrix, levels = rotation(dim).to(x.device), centroids(bits).to(x.device) / math.sqrt(dim)
    rotated = x.double() / norms.clamp(min=1e-30) @ matrix.T
    rounded = levels[torch.bucketize(rotated, (levels[1:] + levels[:-1]) / 2)]
    back: Tensor = rounded @ matrix * norms
    return back


def decoded_unbiased(x: Tensor, bits: int) -> Tensor:
    """What codes without bias in inner products give back of vectors x (..., d): TurboQuant, algorithm 2.

    One bit less as in `decoded`, and of what it leaves the signs under a Gaussian matrix S, and the norm:
    x~ + sqrt(pi / 2) / d * |r| * S^T sign(S r), r = x - x~.
    """
    first = decoded(x, bits - 1)
    left, matrix = x.double() - first, projection(x.shape[-1]).to(x.device)
    signs = torch.where(left @ matrix.T < 0, -1.0, 1.0).double()
    norms = torch.linalg.vector_norm(left, dim=-1, keepdim=True)
    back: Tensor = first + math.sqrt(math.pi / 2) / x.shape[-1] * norms * (signs @ matrix)
    return back


@dataclass(frozen=True)
class TurboQuant(OwnFormat):
    """See `turboquant`."""

    bits: int
    unbiased: bool

    def open(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: PromptBatch, budget: str, codec: str
    ) -> MillpondCache:
        cache = compress(model, "full")
        _after_first_pass(cache, lambda: self.code(cache))
        return cache

    @no_autograd
    def code(self, cache: MillpondCache) -> None:
        """Replace all that a cache holds by what the codes would give back."""
        code_keys = decoded_unbiased if self.unbiased else decoded
        for pool in cache.pools:
            for keys, values in zip(pool.arrays.keys, pool.arrays.values, strict=True):
                keys.copy_(code_keys(keys.nan_to_num(0, 0, 0), self.bits))
                values.copy_(decoded(values.nan_to_num(0, 0, 0), self.bits))

    def claims(self, cache: MillpondCache) -> float:
        """Bits of an entry's codes over 16 for each of its numbers."""
        key_dim, value_dim = cache.pools[0].arrays.key_dim, cache.pools[0].arrays.value_dim
        norms = NORM_BITS * (3 if self.unbiased else 2)
        return float((self.bits * (key_dim + value_dim) + norms) / (16 * (key_dim + value_dim)))


def _after_first_pass(cache: MillpondCache, act: Callable[[], None]) -> None:
    """Call `act` once, when the first pass of a cache has ended."""
    end_pass = cache.end_pass

    def end() -> None:
        del cache.end_pass
        end_pass()
        act()

    cache.end_pass = end  # type: ignore[method-assign]


@candidate("turboquant")
def turboquant(
    bits: Annotated[int, "of each number", Range(2, 8)] = 4,
    unbiased: Annotated[bool, "keys in the codes without bias (algorithm 2): a bit is the residual's sign"] = False,
) -> Candidate:
    """Code the prompt as TurboQuant (arXiv:2504.19874) does: a plain reference, no codec.

    What the codes give back is stored in plain numbers; the share of bytes that they would take is noted as claimed.
    What is decoded later stays as it is. The paper's formats between whole bits, which give some channels more, are
    left out.
    """
    return TurboQuant(bits, unbiased)
