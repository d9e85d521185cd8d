"""ClusterSettings: the workers of a cluster, their roles, and what it does when one is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millpond.budget import parse_bytes
from millpond.errors import OptionError

#: Who reads prompts and decodes ("replica"), or only one of the two.
Role = Literal["replica", "prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """The workers of a cluster.

    Attributes:
        replicas: workers that read prompts and decode. prefill, decode: in their place, workers that read prompts, and
            workers that decode behind them. All three None: one replica.
        address: of a running Ray cluster ("auto": the one of this machine); None: a private one on this machine.
        max_replays: how often in a row a request is begun again on another worker, without a new token since, before
            it ends with an error.
        hang_s: seconds that a worker may not answer, or that a step of its engine may take, before it is replaced.
        handoff_memory: most bytes ("256MiB") of the requests that wait in a worker for another one.
        lease_s: seconds in which a worker that was chosen has to fetch such a request; else it is begun again
            elsewhere. Bytes that this process asks for no more are freed after as long.
        checkpoint_tokens: a request's cache is copied to this process after as many tokens of its answer, and again and
            again, so that it goes on from there where its worker is lost; None: it is read and fed as a whole. Copies
            take no more than `handoff_memory` together.

    Raises:
        OptionError: a number out of range, or roles that do not go together. BudgetError: not an amount of bytes.
    """

    replicas: int | None = None
    prefill: int | None = None
    decode: int | None = None
    address: str | None = None
    max_replays: int = 2
    hang_s: float = 120.0
    handoff_memory: str | int = "256MiB"
    lease_s: float = 10.0
    checkpoint_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("replicas", "prefill", "decode"):
            given = getattr(self, name)
            if given is not None and (type(given) is not int or given < 1):
                raise OptionError(f"{name}={given!r}: must be a whole number, at least 1, or be left out")
        if (self.prefill is None) != (self.decode is None):
            missing = "decode" if self.decode is None else "prefill"
            raise OptionError(f"prefill and decode go together; give {missing} too, or replicas in place of both")
        if self.replicas is not None and self.prefill is not None:
            raise OptionError("replicas do what prefill and decode workers do; leave one of the two out")
        if self.max_replays < 0:
            raise OptionError(f"max_replays={self.max_replays}: must be 0 or more")
        for name in ("hang_s", "lease_s"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name}={getattr(self, name)}: must be more than 0 seconds")
        every = self.checkpoint_tokens
        if every is not None and (type(every) is not int or every < 1):
            raise OptionError(f"checkpoint_tokens={every!r}: must be a whole number, at least 1, or be left out")
        object.__setattr__(self, "handoff_memory", parse_bytes(self.handoff_memory))

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
