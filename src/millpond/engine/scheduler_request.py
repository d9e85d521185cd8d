"""A request as the scheduler sees it: counters, flags, and the bytes that it needs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from millpond.engine.fairness import ClientService


class RequestStatus(enum.Enum):
    """Where a request is.

    Attributes:
        WAITING: it has not begun. PREFILL: its prompt is read. DECODE: its answers get tokens.
        PREEMPTED: it had begun, and is swapped out of the pool.
        PINNED: it is a shared prefix, held for those that begin with it. RELEASED: one that nothing needs any more.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    PINNED = "pinned"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of pages that a request holds at most.

    Attributes:
        prefill: until its prompt is planned. shared: then, for all of its answers together. each: for each of them.
        disk: of a disk, in each of the layers that lie there.
    """

    prefill: int
    shared: int
    each: int
    disk: int = 0

    def decoding(self, num_answers: int) -> int:
        """While `num_answers` answers continue."""
        return self.shared + self.each * num_answers

    def peak(self, num_answers: int) -> int:
        """At any time."""
        return max(self.prefill, self.decoding(num_answers))


@dataclass(slots=True, eq=False)
class SchedulerRequest:
    """One request as the scheduler sees it.

    Attributes:
        key: its name. num_prompt_tokens: tokens to read. memory_need: see `MemoryNeed`.
        num_answers: answers that are not finished.
        client_id: names the client. priority: lower goes first.
        deadline: when it ends at the latest, on the caller's clock; None: never. is_uncut: its prompt cannot be cut.
        arrival, client: given by the scheduler. num_computed_tokens: tokens of the prompt that were read.
        times_passed: requests of others that began before it while it did not fit.
        steps_waited: steps in which it did not fit.
        is_skippable: its answers decode in a batch of their own, which may pass a step.
        is_shared_prefix: it is a common beginning of prompts, and is held once it is read.
        prefix: the shared prefix that it begins with, and waits for.
        is_loading: what it needs is still read from files.
        max_new_tokens: most tokens of each answer. num_decoded_tokens: those that decoding steps have added.
        growth: bytes of an answer that are not held yet after each of several equal parts of it, see `growth_bytes`;
            empty: all are.
        status: where it is.
    """

    key: str
    num_prompt_tokens: int
    memory_need: MemoryNeed
    num_answers: int = 1
    client_id: str = ""
    priority: int = 0
    deadline: float | None = None
    is_uncut: bool = False
    arrival: int = 0
    num_computed_tokens: int = 0
    times_passed: int = 0
    steps_waited: int = 0
    is_skippable: bool = False
    is_shared_prefix: bool = False
    prefix: SchedulerRequest | None = None
    is_loading: bool = False
    max_new_tokens: int = 0
    num_decoded_tokens: int = 0
    growth: tuple[int, ...] = ()
    client: ClientService = field(default_factory=lambda: ClientService(0))
    status: RequestStatus = RequestStatus.WAITING

    @property
    def queue_key(self) -> tuple[int, int, int, int]:
        """The lowest goes first."""
        return self.priority, *self.client.queue_key, self.arrival

    @property
    def is_running(self) -> bool:
        """Whether it reads or decodes."""
        return self.status in (RequestStatus.PREFILL, RequestStatus.DECODE)

    @property
    def waits_for_prefix(self) -> bool:
        """Whether the shared prefix that it begins with is still to be read."""
        return (
            self.status is RequestStatus.WAITING
            and self.prefix is not None
            and self.prefix.status is not RequestStatus.PINNED
        )

    @property
    def is_prompt_done(self) -> bool:
        """Whether its prompt is read."""
        return self.num_computed_tokens == self.num_prompt_tokens and not self.is_shared_prefix

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are kept for it."""
        return (
            self.memory_need.decoding(self.num_answers)
            if self.num_computed_tokens == self.num_prompt_tokens
            else self.memory_need.peak(self.num_answers)
        )
