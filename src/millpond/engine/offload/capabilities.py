"""Placements and schedules that an engine can run."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.engine.offload.plan import DEVICE, DISK, HOST, Ends, Plan
from millpond.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can carry out of what a plan can say.

    Attributes:
        weights, kv: tiers that may hold them. ends: those that may hold embeddings and head, of `weights`.
        schedules: that it runs.
        micro_batches: whether products of a block may pass a layer in several parts.
    """

    weights: tuple[str, ...] = (HOST, DISK)
    kv: tuple[str, ...] = (HOST, DISK)
    ends: tuple[Ends, ...] = ("host", "disk")
    schedules: tuple[str, ...] = ("row", "zigzag", "diagonal")
    micro_batches: bool = False

    def check(self, plan: Plan) -> None:
        """
        Raises:
            OptionError: the plan uses a tier or a schedule that the engine does not run; the message says which it
                does.
        """
        for name, shares, tiers in (("weights", plan.weights, self.weights), ("kv", plan.kv, self.kv)):
            for tier, share in shares.items():
                if share and tier not in tiers:
                    reason = "no accelerator is used" if tier == DEVICE else "this engine does not move it there yet"
                    raise OptionError(
                        f"plan: {share:.0%} of the {name} on the tier {tier!r}: {reason}; {name} may lie on "
                        f"{' or '.join(tiers)}"
                    )
        if plan.schedule not in self.schedules:
            raise OptionError(
                f"plan: the schedule {plan.schedule!r} is known to the cost model, but this engine does not run it "
                f"yet; use {' or '.join(map(repr, self.schedules))}"
            )


#: Of the engine in this package.
ENGINE = Capabilities()
#: Everything that the cost model knows.
EVERYTHING = Capabilities(
    weights=(DEVICE, HOST, DISK), kv=(DEVICE, HOST, DISK), schedules=("row", "zigzag", "diagonal"), micro_batches=True
)
