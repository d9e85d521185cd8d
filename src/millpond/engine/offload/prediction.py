"""Predicted speed of a plan, what bounds it, and its bytes by tier and purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted figures of a plan for one workload.

    Attributes:
        seconds: from the first prompt token to the last new token of one block.
        prefill_s, decode_s: its two parts.
        tokens_per_s: new tokens of the block over `seconds`.
        prefill_tokens_per_s, decode_tokens_per_s: prompt tokens over `prefill_s`, new tokens over `decode_s`.
        prefill_bound, decode_bound: what takes longest in a sweep: "disk reads", "disk writes", "link", "compute" or
            "attention".
        bytes: by tier, then by purpose; what tiers that can be addressed hold at the peak.
        what_if: tokens per second of the best plan when one thing changes, by a name of the change.
    """

    seconds: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefill_bound: str
    decode_bound: str
    bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    what_if: Mapping[str, float] = field(default_factory=dict)

    def total(self, tier: str) -> int:
        """Bytes of all purposes in a tier."""
        return sum(self.bytes.get(tier, {}).values())
