"""ClusterSettings: the workers of a cluster, their roles, and what it does when one is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from millpond.budget import parse_bytes
from millpond.errors import OptionError
from millpond.setting import check_settings, setting

if TYPE_CHECKING:
    from millpond.engine.cluster_figures import Role


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """The workers of a cluster.

    Raises:
        OptionError: a number out of range, or roles that do not go together. BudgetError: not an amount of bytes.
    """

    replicas: int | None = setting(
        None, "Engines that answer, each with its own memory limit.", at_least=1, default_text="one, no Ray"
    )
    prefill: int | None = setting(
        None,
        "Engines that read prompts, for `decode` engines that continue.",
        more="In place of `replicas`.",
        at_least=1,
    )
    decode: int | None = setting(None, "Engines that decode after `prefill` engines.", at_least=1)
    address: str | None = setting(None, "A running Ray cluster; auto: this machine's.", default_text="a private one")
    max_replays: int = setting(
        2,
        "How often in a row a request is started again on another worker, without a new token, before it ends "
        "with an error.",
        at_least=0,
    )
    hang_s: float = setting(
        120.0,
        "Seconds that a worker may not answer, or that a step of its engine may take, before it is replaced.",
        above=0,
    )
    handoff_memory: str | int = setting(
        "256MiB", "Caches that wait in a `prefill` engine for others, at most.", parse=parse_bytes
    )
    lease_s: float = setting(
        10.0,
        "Seconds in which a chosen worker must fetch a waiting request; otherwise it is started again elsewhere.",
        more="Bytes that this process asks for no more are freed after as long.",
        above=0,
    )
    checkpoint_tokens: int | None = setting(
        None,
        "Copy the cache of a request to the server after every N tokens, so that it goes on from there where its "
        "worker is lost; `handoff_memory` bounds the copies.",
        at_least=1,
        default_text="none",
    )

    replan_s: float | None = setting(
        None,
        "Seconds between two looks at the load of a split: if mean prompts or answers change by a fifth, workers "
        "change their role by drain and restart, if that balances the phases.",
        above=0,
        default_text="roles stay",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.prefill is None) != (self.decode is None):
            missing = "decode" if self.decode is None else "prefill"
            raise OptionError(f"prefill and decode go together; give {missing} too, or replicas in place of both")
        if self.replicas is not None and self.prefill is not None:
            raise OptionError("replicas do what prefill and decode workers do; leave one of the two out")
        if self.replan_s is not None and self.prefill is None:
            raise OptionError(
                f"replan_s={self.replan_s:g} changes roles, and replicas have one: give prefill and decode"
            )

    @property
    def handoff_bytes(self) -> int:
        """`handoff_memory` in bytes."""
        return parse_bytes(self.handoff_memory)

    @property
    def roles(self) -> tuple[Role, ...]:
        """One for each worker."""
        workers: list[Role] = []
        if self.prefill is None or self.decode is None:
            workers += ["replica"] * (self.replicas or 1)
        else:
            workers += ["prefill"] * self.prefill
            workers += ["decode"] * self.decode
        return tuple(workers)
