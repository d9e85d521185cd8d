"""Scores from keys alone: their norm, and their angle to the mean direction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View

#: Binary digits of a key's length that count. Rounding moves a float32 length by the last few of its 24.
LENGTH_DIGITS = 14


@dataclass(frozen=True, slots=True)
class KeyNorm:
    """s_j = - ||k_j||: short keys stay, because long ones tend to gather little attention.

    Lengths count with 14 binary digits (within 0.006 %), so that those which are equal but for rounding are equal, and
    the newest stays. In a first layer each occurrence of a token has the same length, whatever its position, and how
    many rows were multiplied at once would decide.
    """

    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        share, exponent = torch.frexp(torch.linalg.vector_norm(view.keys, dim=-1).float())
        return -torch.ldexp((share * 2**LENGTH_DIGITS).round(), exponent - LENGTH_DIGITS)


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """s_j = - cos(k_j, mean_i k_i / ||k_i||) over the entries i of the head.

    Keys unlike the others stay. It ranks the entries as the sum of their cosines with all others would.
    """

    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        unit = F.normalize(view.keys, dim=-1)
        anchor = F.normalize(unit.sum(1, keepdim=True), dim=-1)
        return -(unit * anchor).sum(-1)
