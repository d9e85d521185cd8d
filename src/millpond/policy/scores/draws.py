"""Random numbers that are drawn anew at each plan: a uniform one per entry, and samples by weight (Gumbel top-k)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.kernels.decode_rules import Evict, Signal, hash_priority
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View

#: Numbers that `hash_priority` gives: 0 to this, less one.
_HASHES = 2**24


def seed_of_round(seed: int, number: int) -> int:
    """Return the seed of one round of draws.

    The round's number is mixed before it meets a position, so that no round repeats another one a few positions later.

    Args:
        seed: Seed of a layer.
        number: Number of the round, such as the tokens that a text has when it is planned.
    """
    mask = 0xFFFFFFFF
    mixed = (seed * 0x27D4EB2F + number * 0x165667B1 + 0x9E3779B9) & mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & mask
    return mixed ^ (mixed >> 16)


def uniform_draw(seed: int, view: View) -> Tensor:
    """Return (H, N) float32 numbers strictly between 0 and 1, drawn anew per KV head and plan.

    The tokens seen are the round's number: a batch, a page size or a stored copy changes no draw.
    """
    hashes = hash_priority(seed_of_round(seed, view.seen), view.heads, view.positions)
    return (hashes + 0.5).clamp(max=_HASHES - 1.0) / _HASHES


def gumbel_top_k(log_weights: Tensor, seed: int, view: View) -> Tensor:
    """Return (H, N) float64 whose k highest are a sample by weight, without replacement.

    They are one for any k: the order of log w_j - log(-log u_j), with uniform u_j, is that of draws one after the
    other, each in proportion to the weights that are left.

    Args:
        log_weights: (H, N) logs of the weights; -inf: drawn after all others.
        seed: Seed of the layer.
        view: Entries that are drawn from.
    """
    u = uniform_draw(seed, view).double()
    return log_weights.double() - torch.log(-torch.log(u))


@dataclass(frozen=True, slots=True)
class RandomRound:
    """s_j = a uniform number, drawn anew per KV head at each plan (Random Attention)."""

    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        return uniform_draw(seed, view)
