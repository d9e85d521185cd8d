"""A request as the scheduler sees it: counters, flags, and the bytes that it needs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from millpond.engine.fairness import ClientService


class RequestStatus(enum.Enum):
    """Stage of a request.

    Attributes:
        WAITING: It has not begun.
        PREFILL: Its prompt is being read.
        DECODE: Its answers get tokens.
        PREEMPTED: It had begun, and is swapped out of the pool.
        PINNED: It is a shared prefix, held for the requests that begin with it.
        RELEASED: It is a shared prefix that nothing needs any more.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    PINNED = "pinned"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Most bytes of pages that a request holds.

    Attributes:
        prefill: Bytes until the prompt is planned.
        shared: Bytes afterwards that all answers share.
        each: Bytes afterwards per answer.
        disk: Bytes on disk, per layer stored there.
    """

    prefill: int
    shared: int
    each: int
    disk: int = 0

    def decoding(self, num_answers: int) -> int:
        """Return the bytes while `num_answers` answers continue."""
        return self.shared + self.each * num_answers

    def peak(self, num_answers: int) -> int:
        """Return the most bytes at any time."""
        return max(self.prefill, self.decoding(num_answers))


@dataclass(slots=True, eq=False)
class SchedulerRequest:
    """One request as the scheduler sees it.

    Attributes:
        key: Its name.
        num_prompt_tokens: Tokens to read.
        memory_need: Bytes that it may hold.
        num_answers: Answers that are not finished.
        client_id: Name of the client.
        priority: Lower goes first.
        deadline: Latest end, on the caller's clock; None: never.
        is_uncut: Whether its prompt cannot be cut.
        piece: Tokens at whose multiples alone its prompt is cut; 0: where the scheduler cuts all.
        arrival: Order of arrival, set by the scheduler.
        num_computed_tokens: Tokens of the prompt that were read.
        times_passed: Requests of others that began before it while it did not fit.
        steps_waited: Steps in which it did not fit.
        is_skippable: Whether its answers decode in a batch of their own, which may pass a step.
        is_shared_prefix: Whether it is a common beginning of prompts, which is held once it is read.
        prefix: Shared prefix that it begins with, and waits for.
        is_loading: Whether something that it needs is still being read from files.
        max_new_tokens: Most tokens of each answer.
        num_decoded_tokens: Tokens per answer that decoding steps have added.
        growth: Bytes per answer still to be allocated after each of several equal parts of it, see `growth_bytes`;
            empty if all are allocated at once.
        row_bytes: Of a planned batch: bytes of the activations of one row of a step. Its answers decode in addition to
            the tokens of a step, and count with their rows and not against the most sequences where memory is limited.
            0: its answers are among these tokens and sequences.
        client: Service of its client, set by the scheduler.
        status: Its stage.
    """

    key: str
    num_prompt_tokens: int
    memory_need: MemoryNeed
    num_answers: int = 1
    client_id: str = ""
    priority: int = 0
    deadline: float | None = None
    is_uncut: bool = False
    piece: int = 0
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
    row_bytes: int = 0
    client: ClientService = field(default_factory=lambda: ClientService(0))
    status: RequestStatus = RequestStatus.WAITING

    @property
    def queue_key(self) -> tuple[int, int, int, int]:
        """Sort key in the queue; the lowest goes first."""
        return self.priority, *self.client.queue_key, self.arrival

    @property
    def is_running(self) -> bool:
        """Whether it reads or decodes."""
        return self.status in (RequestStatus.PREFILL, RequestStatus.DECODE)

    @property
    def waits_for_prefix(self) -> bool:
        """Whether the shared prefix that it begins with has not been read yet."""
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
        is_read = self.num_computed_tokens == self.num_prompt_tokens
        pages = self.memory_need.decoding if is_read else self.memory_need.peak
        return pages(self.num_answers) + self.row_bytes * self.num_answers
