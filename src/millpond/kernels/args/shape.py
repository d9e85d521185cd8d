"""Attention variants of a layer besides plain softmax(q k / sqrt d)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Settings of one layer's attention.

    Attributes:
        scale: factor on q.k.
        softcap: 0 or c, logits become c * tanh(logit / c).
        window: 0 or w: an entry is visible while q_pos - position < w.
        sink_logits: (Hq,) float32 or None: a logit per query head that only enters the denominator (gpt-oss).
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    sink_logits: Tensor | None = None
