"""The scheduler: chooses the requests of the next step, and those that wait or are preempted.

It knows numbers only: tokens to read, bytes that a request will hold, clients, priorities and deadlines. It sees no
model, no page and no clock; how long its steps took it is given.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from millpond.engine.age_spread import AgeSpread, peak_bytes
from millpond.engine.fairness import ClientService, FairQueue, Pace
from millpond.errors import OptionError

#: Share of a step's tokens that prompts get at least, however many sequences decode; and at most, while a client
#: decodes whose client has had less service, so that its next tokens do not wait for long passes.
READING_SHARE = 8
#: Prompts of which a step reads, however short they are; and where other clients decode, for whom one may take as long
#: as five steps.
MOST_PIECES, GUEST_PIECES = 32, 2
#: Tokens of service that a prompt counts for in addition to its own: one of two tokens takes as long as several steps.
PROMPT_SERVICE = 16
#: Answers of other clients that decode with one client's at any time; more decode in turns. Of a small model on a
#: CPU, a step of eight takes half as long again as a step of one.
MOST_BESIDE = 8
#: Jobs of other clients that may begin before one that does not fit.
MOST_PASSES = 16
#: Steps that a job waits before it takes the room of a client who has had more service, but less than a step's tokens
#: more.
PATIENCE = 8
#: Clients whose first waiting jobs may take the place of running ones in a step.
_TRIES = 4


class State(enum.Enum):
    """Where a job is: not begun; reading its prompt; decoding; begun, and swapped out of the pool; a trunk that is
    held for those that begin with it; or one that was let go."""

    WAITING = "waiting"
    READING = "reading"
    DECODING = "decoding"
    SWAPPED = "swapped"
    HELD = "held"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of pages that a job holds at most.

    Attributes:
        reading: until its prompt is planned. shared: then, for all of its answers together. each: for each of them.
        disk: of a disk, in each of the layers that lie there.
    """

    reading: int
    shared: int
    each: int
    disk: int = 0

    def decoding(self, width: int) -> int:
        """While `width` answers continue."""
        return self.shared + self.each * width

    def most(self, width: int) -> int:
        """At any time."""
        return max(self.reading, self.decoding(width))


@dataclass(slots=True, eq=False)
class Job:
    """One request as the scheduler sees it.

    Attributes:
        key: its name. prompt: tokens to read. need: see `MemoryNeed`. width: answers that are not finished.
        client: id of the client. priority: lower goes first.
        deadline: when it ends at the latest, on the caller's clock; None: never. whole: its prompt cannot be cut.
        arrival, account: given by the scheduler. read: tokens of the prompt that were read.
        passes: jobs of others that began before it while it did not fit. waited: steps in which it did not.
        apart: its answers decode in a batch of their own, which may pass a step.
        trunk: it is a common beginning of prompts, and is held once it is read. after: the trunk that it begins with,
            and waits for. loading: what it needs is still read from files.
        new, age: most tokens of each answer, and those that decoding steps have added. later: see `GrowingJob`.
    """

    key: str
    prompt: int
    need: MemoryNeed
    width: int = 1
    client: str = ""
    priority: int = 0
    deadline: float | None = None
    whole: bool = False
    arrival: int = 0
    read: int = 0
    passes: int = 0
    waited: int = 0
    apart: bool = False
    trunk: bool = False
    after: Job | None = None
    loading: bool = False
    new: int = 0
    age: int = 0
    later: tuple[int, ...] = ()
    account: ClientService = field(default_factory=lambda: ClientService(0))
    state: State = State.WAITING

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """The lowest goes first."""
        return self.priority, *self.account.rank, self.arrival

    @property
    def running(self) -> bool:
        """Whether it reads or decodes."""
        return self.state in (State.READING, State.DECODING)

    @property
    def waits(self) -> bool:
        """Whether the trunk that it begins with is still to be read."""
        return self.state is State.WAITING and self.after is not None and self.after.state is not State.HELD

    @property
    def settled(self) -> bool:
        """Whether its prompt is read."""
        return self.read == self.prompt and not self.trunk

    @property
    def reserved(self) -> int:
        """Bytes that are kept for it."""
        return self.need.decoding(self.width) if self.read == self.prompt else self.need.most(self.width)


@dataclass(slots=True)
class Step:
    """What runs next.

    Attributes:
        drop: trunks to let go, before all else. out: jobs to preempt, swapped out first. back: jobs to resume, swapped
            in.
        decodes: jobs whose answers each get a token. chunks: jobs and how many tokens of their prompts are read.
        contested: guests take part (see `Pace`): True; they would, and pass: False; None: there are none.
    """

    drop: list[Job] = field(default_factory=list)
    out: list[Job] = field(default_factory=list)
    back: list[Job] = field(default_factory=list)
    decodes: list[Job] = field(default_factory=list)
    chunks: list[tuple[Job, int]] = field(default_factory=list)
    contested: bool | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing runs."""
        return not (self.decodes or self.chunks)


class Scheduler:
    """Decodes first, then prompts, under a budget of tokens per step.

    The order is that of priority, then of the client who has had less service, then of arrival. A job begins when what
    it may hold fits besides the reserve of running jobs and of trunks, and when the trunk that it begins with is read.
    Jobs of a better priority take the place of running ones; so do those of a client who has had less service than
    another and holds less than this one. The first in the queue is passed over by few others, and by none of its own
    client but where it waits for its trunk, so none starves.

    Args:
        limit_bytes: of the pages of all jobs; None for no limit.
        step_tokens: tokens of one step, where prompts are read.
        most_running: sequences that run at a time.
        overcommit: how often the limit may be promised; more than 1 counts on answers that end early, and carries
            out the newest when they do not.
        prompt_block: a prompt is cut at multiples of as many tokens, and nowhere else; None: wherever a step is full.
        spread: jobs count with what they hold at their ages, and begin spread evenly: see `AgeSpread`.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        *,
        step_tokens: int = 512,
        most_running: int = 256,
        overcommit: float = 1.0,
        prompt_block: int | None = None,
        spread: bool = False,
    ) -> None:
        for name, value in (("step_tokens", step_tokens), ("most_running", most_running), ("overcommit", overcommit)):
            if not value >= 1:
                raise OptionError(f"{name}={value} must be at least 1")
        self.limit_bytes = limit_bytes
        self.step_tokens = step_tokens
        self.most_running = most_running
        self._prompt_block = prompt_block
        self._spread = AgeSpread(most_running) if spread else None
        self._promised = None if limit_bytes is None else int(limit_bytes * overcommit)
        self._jobs: dict[str, Job] = {}
        self._clients = FairQueue()
        self._pace = Pace()
        self._decoders: set[ClientService] = set()  # that decode at every step
        self._arrivals = 0
        self._closed = False  # a job was preempted because pages ran short: none begins until one ends

    # ------------------------------------------------------------------ jobs

    def add(self, job: Job) -> None:
        """A job joins the queue. Its need must fit the limit, its width what may run."""
        assert job.key not in self._jobs, f"{job.key} is there already"
        assert self.limit_bytes is None or job.need.most(job.width) <= self.limit_bytes, "it can never run"
        assert job.width <= self.most_running, "it can never run"
        job.arrival, job.account = self._arrivals, self._clients.enter(job.client)
        self._arrivals += 1
        self._jobs[job.key] = job

    @property
    def spreads(self) -> bool:
        """Whether jobs count with what they hold at their ages."""
        return self._spread is not None

    def may_join(self, job: Job) -> bool:
        """Whether a job that decodes elsewhere may go on here now, besides what is kept for running ones."""
        runs = any(True for _ in self._running())
        return not runs or (not self._closed and self._fits(job))

    def remove(self, job: Job) -> None:
        """A job is finished or cancelled; its pages are free."""
        del self._jobs[job.key]
        self._clients.leave(job.account)
        self._closed = False

    def mark_read(self, job: Job, n_tokens: int, *, served: bool = True) -> None:
        """Some tokens of a prompt were read; or, where they are not `served`, taken over from another."""
        job.read += n_tokens
        job.account.served += n_tokens * served
        assert job.read <= job.prompt, "a prompt is read once"
        if job.read == job.prompt:
            job.state = State.HELD if job.trunk else State.DECODING
            job.account.served += PROMPT_SERVICE * served

    def set_width(self, job: Job, width: int) -> None:
        """Only `width` answers of a job continue."""
        job.width = width
        self._closed = False

    def restart(self, job: Job, width: int) -> None:
        """A running job waits again, to read its prompt from the first token and to go on with `width` answers."""
        job.state, job.width, job.apart = State.WAITING, width, False
        job.read = job.age = job.passes = job.waited = 0
        self._closed = False

    def keep_only(self, step: Step, jobs: Collection[Job]) -> None:
        """Let only some of a step's jobs run in it; the others let it pass."""
        for job in step.decodes:
            if job not in jobs:
                job.account.served -= job.width
                job.age -= 1
        step.decodes = [job for job in step.decodes if job in jobs]
        step.chunks = [(job, n) for job, n in step.chunks if job in jobs]
        step.contested = None

    def victim(self) -> Job | None:
        """Preempt a running job: of the worst priority the newest.

        No job begins or resumes before another one ends, so that two do not push each other out at every step.
        """
        job = max(self._running(), key=lambda j: j.rank, default=None)
        if job is not None:
            job.state = State.SWAPPED
            self._closed = True
        return job

    def defer(self, job: Job) -> None:
        """Note that a preempted job could not be resumed."""
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
        """Bytes that are kept for the running jobs and for trunks."""
        return sum(job.reserved for job in self._in((State.READING, State.DECODING, State.HELD)))

    # ------------------------------------------------------------------ the step

    def plan(self) -> Step:
        """What runs next. Jobs that begin or resume count as running from now on."""
        step = Step()
        if self._spread is not None:
            self._spread.next_step()
        self._make_way(step)
        self._admit_preempted_and_new(step)
        few = max(self.step_tokens // READING_SHARE, 1)
        guests = self._choose_decodes(step, self._ahead(few))
        rows = sum(job.width for job in step.decodes)
        left = max(self.step_tokens - rows, few)
        least = min((job.account.served for job in step.decodes), default=None)
        for job in self._ordered((State.READING,)):
            if step.contested is False and job in guests:
                continue
            pieces = GUEST_PIECES if job in guests and step.decodes else MOST_PIECES
            if least is not None and job.account.served - least >= self.step_tokens:
                left = min(left, few - sum(n for _, n in step.chunks))
            n = self._next_part(job)
            if left <= 0 or len(step.chunks) >= pieces or (n is not None and n > left and step.chunks):
                break
            n = min(job.prompt - job.read, left) if n is None else n
            step.chunks.append((job, n))
            left -= n
        for job in step.decodes:
            job.account.served += job.width
            job.age += 1
        return step

    def _next_part(self, job: Job) -> int | None:
        """Tokens of a prompt that are read in one pass; None where it may be cut anywhere."""
        rest = job.prompt - job.read
        if job.whole:
            return rest
        block = self._prompt_block
        return None if block is None else min(rest, block - job.read % block)

    def took_seconds(self, step: Step, seconds: float) -> None:
        """How long a step took."""
        if step.contested:
            self._pace.with_them(seconds)
        else:
            self._pace.without_them(seconds, bool(step.chunks) or step.contested is None)

    def _ahead(self, gap: int) -> set[Job]:
        """Running jobs of clients who have had at least `gap` tokens more service than another running one."""
        least = min((job.account.served for job in self._running()), default=0)
        return {job for job in self._running() if job.account.served - least >= gap}

    def _choose_decodes(self, step: Step, ahead: set[Job]) -> set[Job]:
        """Add the jobs that decode to a step; returns the guests among those that read.

        Guests are the answers of clients with far more of them than others, as far as they are many; prompts of other
        clients than those whose answers are no guests; and prompts of clients who are ahead.
        """
        decoding = self._ordered((State.DECODING,))
        hosts = _hosts(self._running())
        if hosts != self._decoders:
            self._decoders = hosts
            self._pace.begin_anew()
        wide = False
        for job in decoding:
            job.apart = job.account not in hosts
            wide = wide or job.apart
        others = {job.account for job in decoding if not job.apart}
        guests = {job for job in self._in((State.READING,)) if job in ahead or others - {job.account}}
        for_others = others or any(job not in guests for job in self._in((State.READING,)))
        if for_others and (guests or wide):  # else nothing but guests is there, and there is nothing to pass for
            step.contested = self._pace.may_go
        step.decodes = [job for job in decoding if step.contested is not False or not job.apart]
        return guests

    def _make_way(self, step: Step) -> None:
        """Carry out running jobs in whose place a waiting one goes: the first of those whom that makes fit."""
        tried: dict[ClientService, Job] = {}
        for first in () if self._closed else self._queue():
            if first.account in tried or first.waits or first.loading:
                continue
            out: list[tuple[Job, State]] = []
            while not self._fits(first) and (worst := self._in_whose_place(first)) is not None:
                out.append((worst, worst.state))
                worst.state = State.SWAPPED
            if self._fits(first):
                step.out = [job for job, _ in out]
                return
            for job, state in out:
                job.state = state
            first.waited += 1
            tried[first.account] = first
            if len(tried) == _TRIES or first.passes >= MOST_PASSES:
                return

    def _in_whose_place(self, first: Job) -> Job | None:
        """The running job that makes way: of a worse priority; or of a client that has had more service and holds more
        than the other would, so that two do not push each other out in turns."""
        worst = max(self._running(), key=lambda job: job.rank, default=None)
        if worst is None or worst.priority > first.priority:
            return worst
        held: dict[ClientService, tuple[int, int]] = {first.account: (first.reserved, first.width)}
        for job in self._running():
            n_bytes, width = held.get(job.account, (0, 0))
            held[job.account] = n_bytes + job.reserved, width + job.width
        own_bytes, own_width = held[first.account]
        room = self._promised is None or self.reserved + first.reserved <= self._promised
        slots = sum(width for _, width in held.values()) <= self.most_running

        def may_go(job: Job) -> bool:
            more = job.account.served - first.account.served
            if job.priority < first.priority or more <= 0 or (more < self.step_tokens and first.waited < PATIENCE):
                return False
            n_bytes, width = held[job.account]
            return (room or n_bytes > own_bytes) and (slots or width > own_width)

        return max(filter(may_go, self._running()), key=lambda job: job.rank, default=None)

    def _admit_preempted_and_new(self, step: Step) -> None:
        passed: dict[ClientService, Job] = {}
        owed: dict[Job | None, int] = {}  # bytes for jobs that wait for their trunk, and for trunks that it waits for
        behind = 0  # the largest of those before this job
        for job in self._queue():
            if job.account in passed or job.loading:
                continue
            if job.waits:
                owed[job] = job.reserved + owed.get(job.after, 0)
                behind = max(behind, owed[job])
            elif job in step.out or not self._may_begin(job, behind, step):
                passed[job.account] = job
            else:
                for other in passed.values():
                    other.passes += 1
                if job.state is State.SWAPPED:
                    step.back.append(job)
                elif self._spread is not None:
                    self._spread.begins(job)
                job.state = State.DECODING if job.read == job.prompt else State.READING
                job.waited = job.passes = 0
            if len(passed) == MOST_PASSES or any(other.passes >= MOST_PASSES for other in passed.values()):
                return

    def _may_begin(self, job: Job, behind: int, step: Step) -> bool:
        if not any(True for _ in self._running()):
            self._let_go(job, step)
            return True
        if self._spread is not None and job.state is State.WAITING and not job.trunk:
            waiting = sum(other.width for other in self._in((State.WAITING,)))
            if not self._spread.may_begin(waiting):
                return False
        unread = [j.prompt - j.read for j in self._in((State.READING,)) if j.rank < job.rank]
        soon = sum(unread) < self.step_tokens and len(unread) < MOST_PIECES
        return not self._closed and self._fits(job, behind) and (soon or job.state is State.SWAPPED)

    def _let_go(self, job: Job, step: Step) -> None:
        """Release trunks, the newest first, until a job fits where nothing runs; none that it begins with."""
        own: set[Job] = set()
        above = job.after
        while above is not None:
            own.add(above)
            above = above.after
        for trunk in sorted(self._in((State.HELD,)), key=lambda one: one.arrival, reverse=True):
            if self._fits(job):
                return
            if trunk not in own:
                trunk.state = State.DROPPED
                step.drop.append(trunk)

    def _fits(self, job: Job, behind: int = 0) -> bool:
        width = sum(j.width for j in self._running())
        fits = self._promised is None or self._reserved_with(job) + behind <= self._promised
        return fits and width + job.width <= self.most_running

    def _reserved_with(self, job: Job) -> int:
        """Bytes that are kept for the running jobs, for trunks, and for one more."""
        if self._spread is None:
            return self.reserved + job.reserved
        return peak_bytes([job, *self._in((State.READING, State.DECODING, State.HELD))])

    def _queue(self) -> list[Job]:
        return self._ordered((State.WAITING, State.SWAPPED))

    def _ordered(self, states: tuple[State, ...]) -> list[Job]:
        return sorted(self._in(states), key=lambda job: job.rank)

    def _running(self) -> Iterable[Job]:
        return self._in((State.READING, State.DECODING))

    def _in(self, states: tuple[State, ...]) -> Iterable[Job]:
        return (job for job in self._jobs.values() if job.state in states)


def _hosts(running: Iterable[Job]) -> set[ClientService]:
    """The clients whose answers decode at every step: first those with few, then those who have had less service, as
    long as there are at most `MOST_BESIDE` besides those of the first."""
    rows: dict[ClientService, int] = {}
    for job in running:
        rows[job.account] = rows.get(job.account, 0) + job.width
    hosts: set[ClientService] = set()
    beside = 0
    for client in sorted(rows, key=lambda one: (rows[one].bit_length() // 2, *one.rank)):
        beside += rows[client] * bool(hosts)
        if beside > MOST_BESIDE:
            break
        hosts.add(client)
    return hosts
