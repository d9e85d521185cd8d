"""Share of a cached chunk's tokens that a new context calls for computing again (Cache-Craft, arXiv:2502.15734).

Numbers only: attention sums, sizes and the order of parts. A part is a piece of a prompt, text or chunk, by its key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Literal, get_args

import torch
from torch import Tensor

from millpond.errors import OptionError, unknown

#: How tokens of a chunk are picked: by attention to earlier parts (Cache-Craft), the first ones (EPIC), those whose
#: keys differ most from the cached ones (CacheBlend), or at random.
Pick = Literal["attention", "head", "deviation", "random"]
#: Share of each chunk's tokens that are computed again: chosen from its context, or a number from 0 to 1.
Recompute = Literal["auto"] | float


def check_recompute(recompute: object) -> None:
    """Check that `recompute` is "auto" or a number from 0 to 1.

    Raises:
        OptionError: neither "auto" nor a number from 0 to 1.
    """
    number = isinstance(recompute, int | float) and not isinstance(recompute, bool) and 0 <= recompute <= 1
    if recompute != "auto" and not number:
        raise OptionError(
            f'recompute={recompute!r} must be "auto", or a share of each chunk from 0 (reuse all) to 1 (compute all)'
        )


def check_pick(pick: object) -> None:
    """Check that `pick` names a way to choose tokens.

    Raises:
        OptionError: no such pick.
    """
    if pick not in get_args(Pick):
        raise unknown("pick", str(pick), get_args(Pick))


def contextual_impact(received: Sequence[float], sizes: Sequence[int], own_mass: float, size: int) -> float:
    """Return CCI = 1 / (1 + exp(-a / b)), from 0.5 (inclusive) to 1 (equations 9 to 11).

    Args:
        received: Per earlier part, the attention that the chunk's tokens give it, summed over tokens and averaged over
            layers and heads.
        sizes: Tokens of these parts.
        own_mass: Attention that the chunk's tokens give the chunk itself.
        size: Tokens of the chunk.
    """
    a = sum(mass / (size * n) for mass, n in zip(received, sizes, strict=True))
    b = own_mass / size**2
    return 1 / (1 + math.exp(-min(a / b, 50.0))) if b > 0 else 1.0


def prefix_overlap(old: Sequence[str], received: Sequence[float], new: Sequence[str]) -> float:
    """Return how much of a chunk's old context the new one has (equations 6 to 8).

    It is beta' = beta (1 - gamma), from 0 to 1. beta is the share of the attention to earlier parts that went to those
    of the new context too, and gamma the share of pairs of these that are in another order.

    Args:
        old: Keys of the parts that the chunk was computed after, each once.
        received: Attention as in `contextual_impact`.
        new: Keys of the parts that it comes after now.

    Departs from the paper: without an old context the ratio is 0 / 0. It counts as 0 where there is a new one, so that
    a chunk that was computed alone is not taken as it is, and as 1 if there is none.
    """
    if not old:
        return 0.0 if new else 1.0
    places = {key: place for place, key in reversed(list(enumerate(new)))}
    common = [key for key in old if key in places]
    total = sum(received)
    beta = sum(mass for key, mass in zip(old, received, strict=True) if key in places) / total if total > 0 else 0.0
    pairs = list(combinations([places[key] for key in common], 2))
    gamma = sum(first > second for first, second in pairs) / len(pairs) if pairs else 0.0
    return beta * (1 - gamma)


def recompute_share(impact: float, overlap: float, alpha: float) -> float:
    """Return the share of a chunk's tokens to compute again (equation 12).

    CFO = clamp(alpha * CCI * (1 - beta'), 0, 1).
    """
    return min(max(alpha * impact * (1 - overlap), 0.0), 1.0)


def layers_before_start(n_layers: int, compute_s: float, load_s: float) -> int:
    """Return how many layers must be in before a prompt begins, to wait for no other.

    L_p = ceil((L - 1) (1 - t_compute / t_load)) + 1, and 1 where a layer is computed for longer than it is loaded.

    Args:
        n_layers: L, the layers of the model.
        compute_s: Seconds that a layer is computed, t_compute.
        load_s: Seconds that a layer is loaded, t_load.
    """
    if compute_s >= load_s:
        return 1
    return math.ceil((n_layers - 1) * (1 - compute_s / load_s)) + 1


def filled_sums(sums: Tensor, computed: Tensor, scores: Tensor) -> Tensor:
    """Return the attention of all tokens of a chunk of which some were computed.

    Args:
        sums: (n, parts + 1) attention of each token to each earlier part and, last, to the chunk itself; what stands
            in the rows of other tokens does not count.
        computed: (n,) bool, the tokens that were computed, at least one.
        scores: (n,) attention of each token to the parts before the variant that the others come from.

    A token that was not computed has no queries here. It counts with its attention to the parts of old, divided among
    those of today as that of the computed tokens is, and with the mean of their attention to the chunk itself.

    Returns:
        (n, parts + 1) float32.
    """
    mean = sums[computed].mean(0)
    to_parts = mean[:-1]
    rest = torch.cat([scores[:, None] * to_parts / to_parts.sum().clamp(min=1e-30), mean[-1:].expand(len(sums), 1)], 1)
    return torch.where(computed[:, None], sums, rest)


def pick_tokens(pick: Pick, scores: Tensor | None, n: int, share: float, seed: int = 0) -> Tensor:
    """Return the tokens to compute again: ceil(share * n) numbers below n, int64, ascending.

    Args:
        pick: Way to choose them.
        scores: (n,) scores of which the highest are picked: attention to earlier parts, or deviations of keys. None:
            the first tokens are taken, which a seam affects most.
        n: Tokens of the chunk.
        share: Share of them to compute again.
        seed: Seed of the pick "random".
    """
    count = min(n, math.ceil(share * n - 1e-9))
    if pick == "random":
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    elif pick == "head" or scores is None or not bool((scores > 0).any()):
        order = torch.arange(n)
    else:
        order = torch.argsort(scores.float(), descending=True, stable=True).cpu()
    return order[:count].sort().values
