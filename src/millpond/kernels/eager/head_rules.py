"""The rules of heads where no native kernel has them: they are left to who asks."""

from __future__ import annotations

from millpond.kernels.args import HeadRuleArgs


def admit(args: HeadRuleArgs) -> bool:
    """Nothing is done."""
    return False
