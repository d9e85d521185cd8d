"""Compactor: keys that no others can represent (Chari and Van Durme, 2025, arXiv:2507.08143)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.methods import method
from millpond.methods._options import GrowInPaper, Sinks
from millpond.option_ranges import POSITIONS, SEEDS, SHARE, Range
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View

#: Added to the Gram matrix, as a share of its mean eigenvalue, so that it can be inverted.
RIDGE = 1e-6


@dataclass(frozen=True, slots=True)
class LeverageAndAttention:
    """s_j = blend * z(leverage_j) + z(attention_j).

    z standardises to mean 0 and deviation 1 over all free entries of the layer. With blend None its weight is the share
    of the text that the budget does not hold.

    leverage_j = x_j^T (X^T X)^-1 x_j, x_j the centred keys, seen through a random Gaussian matrix of `sketch` columns
    where keys have more dimensions (0: never). attention_j = ||v_j|| * mean_i A_ij over the queries i since j was
    written, averaged over three neighbouring entries.
    """

    blend: float | None = None
    sketch: int = 48
    queries: Queries = "all"
    window: int = 0
    signal: Signal = Signal.SUM
    evict: Evict | None = None

    def __post_init__(self) -> None:
        for name, value in (("blend", self.blend), ("sketch", self.sketch)):
            if value is not None and value < 0:
                raise OptionError(f"{name}={value} must not be negative")

    def score(self, view: View, seed: int) -> Tensor:
        assert view.signal is not None, "the cache provides the signal that a score declares"
        mean = view.signal / (view.seen - view.positions).clamp(min=1)
        attention = torch.where(view.free, mean * view.values.norm(dim=-1), 0)
        smooth = F.avg_pool1d(attention[None], 3, stride=1, padding=1)[0]
        leverage = leverage_scores(view.keys, view.free, self.sketch, seed)
        blend = max(0.0, 1 - view.budget / view.seen) if self.blend is None else self.blend
        return (blend * standard(leverage, view.free) + standard(smooth, view.free)).float()


def leverage_scores(keys: Tensor, selected: Tensor, sketch: int, seed: int) -> Tensor:
    """Return (H, N) float64: leverage of the selected keys (H, N, D) in their head, else 0."""
    x = keys.double()
    if 0 < sketch < keys.shape[2]:
        make = torch.Generator().manual_seed(seed)
        x = x @ torch.randn(keys.shape[2], sketch, generator=make, dtype=x.dtype).to(x.device)
    count = selected.sum(1)[:, None, None].clamp(min=1)
    x = torch.where(selected[..., None], x, 0)
    x = torch.where(selected[..., None], x - x.sum(1, keepdim=True) / count, 0)
    gram = x.transpose(1, 2) @ x
    ridge = RIDGE * gram.diagonal(dim1=1, dim2=2).mean(1) + torch.finfo(x.dtype).tiny
    eye = torch.eye(gram.shape[1], device=x.device)
    factor, _ = torch.linalg.cholesky_ex(gram + ridge[:, None, None] * eye)  # NaN goes through, for the plan to report
    white: Tensor = torch.linalg.solve_triangular(factor, x.transpose(1, 2), upper=False)
    return white.square().sum(1)


def standard(value: Tensor, selected: Tensor) -> Tensor:
    """Return `value` (H, N) with mean 0 and deviation 1 over selected entries of all heads."""
    picked = value[selected].double()
    if picked.numel() < 2:
        return torch.zeros_like(value)
    return (value - picked.mean()) / picked.std().clamp(min=1e-6)


@method("compactor", paper="arXiv:2507.08143")
def compactor(
    blend: Annotated[
        float | str,
        "weight of the leverage scores; 0 is attention alone; auto: the evicted share of the text",
        Range(0.0, 1e6),
    ] = "auto",
    sketch: Annotated[
        int, "dimensions that keys are projected to at random first; 0: as they are", Range(0, 4096)
    ] = 48,
    sinks: Sinks = 8,
    recent: Annotated[
        int | float, "newest entries that stay: a count (4) or a share of the budget (0.1)", POSITIONS, SHARE
    ] = 4,
    seed: Annotated[int, "of the random projection", SEEDS] = 0,
    decode: GrowInPaper = "grow",
) -> Policy:
    """Keep entries with outlying keys, and attended ones, for any later question.

    s_j = blend * z(l_j) + z(a_j). l_j = x_j^T (X^T X)^-1 x_j is the leverage score of the centred key in a Gaussian
    sketch; a_j = ||v_j|| * attention, averaged over three neighbours; z standardises over the layer's entries. By
    itself blend is 1 - budget / length of the text: the less stays, the more it counts that no other key says the same.

    Departs from the paper: its attention is not causal, within chunks of the prompt; here it is the model's own, the
    mean that entry j has received from each query since it was written. Leverage is that of the cached keys, after
    RoPE; the paper's is before. Keys of no more dimensions than the sketch are taken exactly. The blend follows the
    budget, as in kvpress. How much a context can lose is not calibrated: the budget says it. decode="evict" keeps the
    budget while decoding: each step ends with a plan, and is slow.
    """
    if isinstance(blend, str) and blend != "auto":
        raise OptionError(f"compactor: blend={blend!r} must be a number, or auto")
    return Policy(
        score=LeverageAndAttention(blend=None if isinstance(blend, str) else blend, sketch=sketch),
        protect=Protect(sinks=sinks, recent=recent),
        every_step=decode == "evict",
        once=decode == "once",
        seed=seed,
    )
