"""Scheduler: which requests run in the next step, and which must wait, or make room.

It knows numbers only: tokens to read, bytes that a request will hold, priorities and deadlines. It sees no model, no
page and no clock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from millpond.errors import OptionError

#: Share of a step's tokens that prompts get at least, however many sequences decode.
READING_SHARE = 8


class State(enum.Enum):
    """Where a job is: not begun; reading its prompt; decoding; begun, and carried out of the pool."""

    WAITING = "waiting"
    READING = "reading"
    DECODING = "decoding"
    SWAPPED = "swapped"


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of pages that a job holds at most.

    Attributes:
        reading: until its prompt is planned. shared: then, for all of its answers together. each: for each of them.
    """

    reading: int
    shared: int
    each: int

    def decoding(self, width: int) -> int:
        """While `width` answers go on."""
        return self.shared + self.each * width

    def most(self, width: int) -> int:
        """At any time."""
        return max(self.reading, self.decoding(width))


@dataclass(slots=True, eq=False)
class Job:
    """One request as the scheduler sees it.

    Attributes:
        key: its name. prompt: tokens to read. need: see `Need`. width: answers that are not finished.
        priority: lower goes first. deadline: when it ends at the latest, on the caller's clock; None: never.
        whole: its prompt cannot be cut. arrival: given by the scheduler. read: tokens of the prompt that were read.
    """

    key: str
    prompt: int
    need: Need
    width: int = 1
    priority: int = 0
    deadline: float | None = None
    whole: bool = False
    arrival: int = 0
    read: int = 0
    state: State = State.WAITING

    @property
    def rank(self) -> tuple[int, int]:
        """The lowest goes first."""
        return self.priority, self.arrival

    @property
    def running(self) -> bool:
        """Whether it holds pages."""
        return self.state in (State.READING, State.DECODING)

    @property
    def reserved(self) -> int:
        """Bytes that are kept for it."""
        return self.need.decoding(self.width) if self.read == self.prompt else self.need.most(self.width)


@dataclass(slots=True)
class Step:
    """What runs next.

    Attributes:
        out: jobs that make room, to be carried out first. back: jobs that come back, to be carried in.
        decodes: jobs whose answers each get a token. chunks: jobs and how many tokens of their prompts are read.
    """

    out: list[Job] = field(default_factory=list)
    back: list[Job] = field(default_factory=list)
    decodes: list[Job] = field(default_factory=list)
    chunks: list[tuple[Job, int]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether nothing runs."""
        return not (self.decodes or self.chunks)


class Scheduler:
    """Decodes first, then prompts in the order of priority and arrival, under a budget of tokens per step.

    A job begins when what it may hold fits beside what is kept for those that run. The first in the queue is never
    passed over, so none starves. Jobs of a better priority take the place of running ones.

    Args:
        limit_bytes: of the pages of all jobs; None for no limit.
        step_tokens: tokens of one step, where prompts are read.
        most_running: sequences that run at a time.
        overcommit: how often the limit may be promised; more than 1 counts on answers that end early, and carries
            out the newest when they do not.
    """

    def __init__(
        self, limit_bytes: int | None, *, step_tokens: int = 512, most_running: int = 256, overcommit: float = 1.0
    ) -> None:
        for name, value in (("step_tokens", step_tokens), ("most_running", most_running), ("overcommit", overcommit)):
            if not value >= 1:
                raise OptionError(f"{name}={value} must be at least 1")
        self.limit_bytes = limit_bytes
        self.step_tokens = step_tokens
        self.most_running = most_running
        self._promised = None if limit_bytes is None else int(limit_bytes * overcommit)
        self._jobs: dict[str, Job] = {}
        self._arrivals = 0
        self._closed = False  # somebody was carried out because pages ran short: nobody begins until somebody ends

    # ------------------------------------------------------------------ jobs

    def add(self, job: Job) -> None:
        """A job joins the queue. Its need must fit the limit, its width what may run."""
        assert job.key not in self._jobs, f"{job.key} is there already"
        assert self.limit_bytes is None or job.need.most(job.width) <= self.limit_bytes, "it can never run"
        assert job.width <= self.most_running, "it can never run"
        job.arrival = self._arrivals
        self._arrivals += 1
        self._jobs[job.key] = job

    def remove(self, job: Job) -> None:
        """A job is finished or cancelled; its pages are free."""
        del self._jobs[job.key]
        self._closed = False

    def took(self, job: Job, n_tokens: int) -> None:
        """Some tokens of a prompt were read."""
        job.read += n_tokens
        assert job.read <= job.prompt, "a prompt is read once"
        if job.read == job.prompt:
            job.state = State.DECODING

    def narrowed(self, job: Job, width: int) -> None:
        """Only `width` answers of a job go on."""
        job.width = width
        self._closed = False

    def victim(self) -> Job | None:
        """The running job that makes room first: of the worst priority the newest; it is carried out from now on.

        Nobody begins or comes back before somebody ends, so that two do not push each other out at every step.
        """
        job = max(self._in((State.READING, State.DECODING)), key=lambda j: j.rank, default=None)
        if job is not None:
            job.state = State.SWAPPED
            self._closed = True
        return job

    def put_off(self, job: Job) -> None:
        """A job that was to come back could not."""
        job.state = State.SWAPPED
        self._closed = True

    def expired(self, now: float) -> list[Job]:
        """Jobs whose deadline has come."""
        return [job for job in self._jobs.values() if job.deadline is not None and job.deadline <= now]

    def count(self, *states: State) -> int:
        """Jobs in these states."""
        return sum(1 for _ in self._in(states))

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def reserved(self) -> int:
        """Bytes that are kept for the running jobs."""
        return sum(job.reserved for job in self._in((State.READING, State.DECODING)))

    # ------------------------------------------------------------------ the step

    def plan(self) -> Step:
        """What runs next. Jobs that begin or come back count as running from now on."""
        step = Step()
        self._make_way(step)
        self._admit_carried_and_new(step)
        step.decodes = self._ordered((State.DECODING,))
        rows = sum(job.width for job in step.decodes)
        left = max(self.step_tokens - rows, self.step_tokens // READING_SHARE, 1)
        for job in self._ordered((State.READING,)):
            rest = job.prompt - job.read
            if left <= 0 or (job.whole and rest > left and step.chunks):
                break
            n = rest if job.whole else min(rest, left)
            step.chunks.append((job, n))
            left -= n
        return step

    def _make_way(self, step: Step) -> None:
        """Carry out running jobs that are worse than the first in the queue, if it does not fit beside them."""
        queue = self._queue()
        while queue and not self._closed and not self._fits(queue[0]):
            worst = max(self._in((State.READING, State.DECODING)), key=lambda j: j.rank, default=None)
            if worst is None or worst.priority <= queue[0].priority:
                return
            worst.state = State.SWAPPED
            step.out.append(worst)

    def _admit_carried_and_new(self, step: Step) -> None:
        left = self.step_tokens
        for job in self._queue():
            alone = not any(True for _ in self._in((State.READING, State.DECODING)))
            unread = sum(j.prompt - j.read for j in self._in((State.READING,)))
            if job in step.out or not (alone or self._may_begin(job, unread < left)):
                return
            if job.state is State.SWAPPED:
                step.back.append(job)
                job.state = State.DECODING if job.read == job.prompt else State.READING
            else:
                job.state = State.READING

    def _may_begin(self, job: Job, room_to_read: bool) -> bool:
        return not self._closed and self._fits(job) and (room_to_read or job.state is State.SWAPPED)

    def _fits(self, job: Job) -> bool:
        width = sum(j.width for j in self._in((State.READING, State.DECODING)))
        fits = self._promised is None or self.reserved + job.reserved <= self._promised
        return fits and width + job.width <= self.most_running

    def _queue(self) -> list[Job]:
        return self._ordered((State.WAITING, State.SWAPPED))

    def _ordered(self, states: tuple[State, ...]) -> list[Job]:
        return sorted(self._in(states), key=lambda job: job.rank)

    def _in(self, states: tuple[State, ...]) -> Iterable[Job]:
        return (job for job in self._jobs.values() if job.state in states)
