"""Head rules without a native kernel: left to the caller."""

from __future__ import annotations

from millpond.kernels.args import HeadRuleArgs


def admit(args: HeadRuleArgs) -> bool:
    """Nothing is done."""
    return False
