"""The scheduler: chooses the requests of the next step, and those that wait or are preempted.

It knows numbers only: tokens to read, bytes that a request will hold, clients, priorities and deadlines. It sees no
model, no page and no clock; how long its steps took it is given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from millpond.engine.diagonal_schedule import DiagonalSchedule, peak_bytes
from millpond.engine.fairness import ClientService, FairQueue, StepThrottle
from millpond.engine.scheduler_request import RequestStatus, SchedulerRequest
from millpond.errors import OptionError

#: Share of a step's tokens that prompts get at least, however many sequences decode; and at most, while a client
#: decodes whose client has had less service, so that its next tokens do not wait for long passes.
READING_SHARE = 8
#: Prompts of which a step reads, however short they are; and where other clients decode, for whom one may take as long
#: as five steps.
MOST_PIECES, THROTTLED_PIECES = 32, 2
#: Tokens of service that a prompt counts for in addition to its own: one of two tokens takes as long as several steps.
PROMPT_SERVICE = 16
#: Answers of other clients that decode with one client's at any time; more decode in turns. Of a small model on a
#: CPU, a step of eight takes half as long again as a step of one.
MOST_UNTHROTTLED = 8
#: Requests of other clients that may begin before one that does not fit.
MOST_PASSES = 16
#: Steps that a request waits before it takes the room of a client who has had more service, but less than a step's
#: tokens more.
PATIENCE = 8
#: Clients whose first waiting requests may take the place of running ones in a step.
_TRIES = 4


@dataclass(slots=True)
class Step:
    """What runs next.

    Attributes:
        release: shared prefixes to let go, before all else. preempt: requests to preempt, swapped out first. resume:
            requests to resume, swapped in.
        decodes: requests whose answers each get a token. prefills: requests and how many tokens of their prompts are
            read.
        runs_throttled: throttled requests take part (see `StepThrottle`): True; they would, and pass: False; None:
            there are none.
    """

    release: list[SchedulerRequest] = field(default_factory=list)
    preempt: list[SchedulerRequest] = field(default_factory=list)
    resume: list[SchedulerRequest] = field(default_factory=list)
    decodes: list[SchedulerRequest] = field(default_factory=list)
    prefills: list[tuple[SchedulerRequest, int]] = field(default_factory=list)
    runs_throttled: bool | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing runs."""
        return not (self.decodes or self.prefills)


class Scheduler:
    """Decodes first, then prompts, under a budget of tokens per step.

    The order is that of priority, then of the client who has had less service, then of arrival. A request begins when
    what it may hold fits besides the reserve of running requests and of shared prefixes, and when the shared prefix
    that it begins with is read. Requests of a better priority take the place of running ones; so do those of a client
    who has had less service than another and holds less than this one. The first in the queue is passed over by few
    others, and by none of its own client but where it waits for its shared prefix, so none starves.

    Args:
        limit_bytes: of the pages of all requests; None for no limit.
        step_tokens: tokens of one step, where prompts are read.
        most_running: sequences that run at a time.
        overcommit: how often the limit may be promised; more than 1 counts on answers that end early, and carries
            out the newest when they do not.
        prompt_block: a prompt is cut at multiples of as many tokens, and nowhere else; None: wherever a step is full.
        spread: requests count with what they hold at their ages, and begin spread evenly: see `DiagonalSchedule`.
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
        self._schedule = DiagonalSchedule(most_running) if spread else None
        self._promised = None if limit_bytes is None else int(limit_bytes * overcommit)
        self._requests: dict[str, SchedulerRequest] = {}
        self._clients = FairQueue()
        self._throttle = StepThrottle()
        self._decoders: set[ClientService] = set()  # that decode at every step
        self._arrivals = 0
        self._closed = False  # a request was preempted because pages ran short: none begins until one ends

    # ------------------------------------------------------------------ requests

    def add(self, request: SchedulerRequest) -> None:
        """A request joins the queue. Its need must fit the limit, its num_answers what may run."""
        assert request.key not in self._requests, f"{request.key} is there already"
        assert self.limit_bytes is None or request.memory_need.peak(request.num_answers) <= self.limit_bytes, (
            "it can never run"
        )
        assert request.num_answers <= self.most_running, "it can never run"
        request.arrival, request.client = self._arrivals, self._clients.add_request(request.client_id)
        self._arrivals += 1
        self._requests[request.key] = request

    @property
    def spreads(self) -> bool:
        """Whether requests count with what they hold at their ages."""
        return self._schedule is not None

    def can_admit_transferred(self, request: SchedulerRequest) -> bool:
        """Whether a request that decodes elsewhere may go on here now, besides what is kept for running ones."""
        runs = any(True for _ in self._running())
        return not runs or (not self._closed and self._fits(request))

    def remove(self, request: SchedulerRequest) -> None:
        """A request is finished or cancelled; its pages are free."""
        del self._requests[request.key]
        self._clients.remove_request(request.client)
        self._closed = False

    def add_computed_tokens(self, request: SchedulerRequest, n_tokens: int, *, served: bool = True) -> None:
        """Some tokens of a prompt were read; or, where they are not `served`, taken over from another."""
        request.num_computed_tokens += n_tokens
        request.client.served += n_tokens * served
        assert request.num_computed_tokens <= request.num_prompt_tokens, "a prompt is read once"
        if request.num_computed_tokens == request.num_prompt_tokens:
            request.status = RequestStatus.PINNED if request.is_shared_prefix else RequestStatus.DECODE
            request.client.served += PROMPT_SERVICE * served

    def set_num_answers(self, request: SchedulerRequest, num_answers: int) -> None:
        """Only `num_answers` answers of a request continue."""
        request.num_answers = num_answers
        self._closed = False

    def restart(self, request: SchedulerRequest, num_answers: int) -> None:
        """A running request waits again, to read its prompt from the first token and to go on with `num_answers`
        answers."""
        request.status, request.num_answers, request.is_skippable = RequestStatus.WAITING, num_answers, False
        request.num_computed_tokens = request.num_decoded_tokens = request.times_passed = request.steps_waited = 0
        self._closed = False

    def keep_only(self, step: Step, requests: Collection[SchedulerRequest]) -> None:
        """Let only some of a step's requests run in it; the others let it pass."""
        for request in step.decodes:
            if request not in requests:
                request.client.served -= request.num_answers
                request.num_decoded_tokens -= 1
        step.decodes = [request for request in step.decodes if request in requests]
        step.prefills = [(request, n) for request, n in step.prefills if request in requests]
        step.runs_throttled = None

    def preempt_newest(self) -> SchedulerRequest | None:
        """Preempt a running request: of the worst priority the newest.

        No request begins or resumes before another one ends, so that two do not push each other out at every step.
        """
        request = max(self._running(), key=lambda j: j.queue_key, default=None)
        if request is not None:
            request.status = RequestStatus.PREEMPTED
            self._closed = True
        return request

    def postpone_resume(self, request: SchedulerRequest) -> None:
        """Note that a preempted request could not be resumed."""
        request.status = RequestStatus.PREEMPTED
        self._closed = True

    def expired(self, now: float) -> list[SchedulerRequest]:
        """Requests whose deadline has come."""
        return [
            request for request in self._requests.values() if request.deadline is not None and request.deadline <= now
        ]

    def count(self, *states: RequestStatus) -> int:
        """Requests in these states."""
        return sum(1 for _ in self._in(states))

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are kept for the running requests and for shared prefixes."""
        return sum(
            request.reserved_bytes
            for request in self._in((RequestStatus.PREFILL, RequestStatus.DECODE, RequestStatus.PINNED))
        )

    # ------------------------------------------------------------------ the step

    def plan(self) -> Step:
        """What runs next. Requests that begin or resume count as running from now on."""
        step = Step()
        if self._schedule is not None:
            self._schedule.next_step()
        self._preempt_for_waiting(step)
        self._admit(step)
        few = max(self.step_tokens // READING_SHARE, 1)
        throttled = self._choose_decodes(step, self._overserved(few))
        rows = sum(request.num_answers for request in step.decodes)
        left = max(self.step_tokens - rows, few)
        least = min((request.client.served for request in step.decodes), default=None)
        for request in self._ordered((RequestStatus.PREFILL,)):
            if step.runs_throttled is False and request in throttled:
                continue
            pieces = THROTTLED_PIECES if request in throttled and step.decodes else MOST_PIECES
            if least is not None and request.client.served - least >= self.step_tokens:
                left = min(left, few - sum(n for _, n in step.prefills))
            n = self._next_chunk_size(request)
            if left <= 0 or len(step.prefills) >= pieces or (n is not None and n > left and step.prefills):
                break
            n = min(request.num_prompt_tokens - request.num_computed_tokens, left) if n is None else n
            step.prefills.append((request, n))
            left -= n
        for request in step.decodes:
            request.client.served += request.num_answers
            request.num_decoded_tokens += 1
        return step

    def _next_chunk_size(self, request: SchedulerRequest) -> int | None:
        """Tokens of a prompt that are read in one pass; None where it may be cut anywhere."""
        rest = request.num_prompt_tokens - request.num_computed_tokens
        if request.is_uncut:
            return rest
        block = self._prompt_block
        return None if block is None else min(rest, block - request.num_computed_tokens % block)

    def record_step_time(self, step: Step, seconds: float) -> None:
        """How long a step took."""
        if step.runs_throttled:
            self._throttle.charge(seconds)
        else:
            self._throttle.credit(seconds, bool(step.prefills) or step.runs_throttled is None)

    def _overserved(self, gap: int) -> set[SchedulerRequest]:
        """Running requests of clients who have had at least `gap` tokens more service than another running one."""
        least = min((request.client.served for request in self._running()), default=0)
        return {request for request in self._running() if request.client.served - least >= gap}

    def _choose_decodes(self, step: Step, ahead: set[SchedulerRequest]) -> set[SchedulerRequest]:
        """Add the requests that decode to a step; returns the throttled requests among those that read.

        Throttled requests are the answers of clients with far more of them than others, as far as they are many;
        prompts of other clients than those whose answers are no throttled requests; and prompts of clients who are
        ahead.
        """
        decoding = self._ordered((RequestStatus.DECODE,))
        unthrottled = _unthrottled_clients(self._running())
        if unthrottled != self._decoders:
            self._decoders = unthrottled
            self._throttle.reset()
        wide = False
        for request in decoding:
            request.is_skippable = request.client not in unthrottled
            wide = wide or request.is_skippable
        others = {request.client for request in decoding if not request.is_skippable}
        throttled = {
            request for request in self._in((RequestStatus.PREFILL,)) if request in ahead or others - {request.client}
        }
        for_others = others or any(request not in throttled for request in self._in((RequestStatus.PREFILL,)))
        if for_others and (throttled or wide):  # else all are throttled
            step.runs_throttled = self._throttle.allows_throttled
        step.decodes = [request for request in decoding if step.runs_throttled is not False or not request.is_skippable]
        return throttled

    def _preempt_for_waiting(self, step: Step) -> None:
        """Carry out running requests in whose place a waiting one goes: the first of those whom that makes fit."""
        tried: dict[ClientService, SchedulerRequest] = {}
        for first in () if self._closed else self._not_running():
            if first.client in tried or first.waits_for_prefix or first.is_loading:
                continue
            out: list[tuple[SchedulerRequest, RequestStatus]] = []
            while not self._fits(first) and (worst := self._preemption_candidate(first)) is not None:
                out.append((worst, worst.status))
                worst.status = RequestStatus.PREEMPTED
            if self._fits(first):
                step.preempt = [request for request, _ in out]
                return
            for request, state in out:
                request.status = state
            first.steps_waited += 1
            tried[first.client] = first
            if len(tried) == _TRIES or first.times_passed >= MOST_PASSES:
                return

    def _preemption_candidate(self, first: SchedulerRequest) -> SchedulerRequest | None:
        """The running request that makes way: of a worse priority; or of a client that has had more service and holds
        more than the other would, so that two do not push each other out in turns."""
        worst = max(self._running(), key=lambda request: request.queue_key, default=None)
        if worst is None or worst.priority > first.priority:
            return worst
        held: dict[ClientService, tuple[int, int]] = {first.client: (first.reserved_bytes, first.num_answers)}
        for request in self._running():
            n_bytes, num_answers = held.get(request.client, (0, 0))
            held[request.client] = n_bytes + request.reserved_bytes, num_answers + request.num_answers
        own_bytes, own_width = held[first.client]
        room = self._promised is None or self.reserved_bytes + first.reserved_bytes <= self._promised
        slots = sum(num_answers for _, num_answers in held.values()) <= self.most_running

        def may_go(request: SchedulerRequest) -> bool:
            more = request.client.served - first.client.served
            if (
                request.priority < first.priority
                or more <= 0
                or (more < self.step_tokens and first.steps_waited < PATIENCE)
            ):
                return False
            n_bytes, num_answers = held[request.client]
            return (room or n_bytes > own_bytes) and (slots or num_answers > own_width)

        return max(filter(may_go, self._running()), key=lambda request: request.queue_key, default=None)

    def _admit(self, step: Step) -> None:
        passed: dict[ClientService, SchedulerRequest] = {}
        owed: dict[
            SchedulerRequest | None, int
        ] = {}  # bytes for requests that wait for their shared prefix, and for shared prefixes that it waits for
        behind = 0  # the largest of those before this request
        for request in self._not_running():
            if request.client in passed or request.is_loading:
                continue
            if request.waits_for_prefix:
                owed[request] = request.reserved_bytes + owed.get(request.prefix, 0)
                behind = max(behind, owed[request])
            elif request in step.preempt or not self._can_admit(request, behind, step):
                passed[request.client] = request
            else:
                for other in passed.values():
                    other.times_passed += 1
                if request.status is RequestStatus.PREEMPTED:
                    step.resume.append(request)
                elif self._schedule is not None:
                    self._schedule.record_start(request)
                request.status = (
                    RequestStatus.DECODE
                    if request.num_computed_tokens == request.num_prompt_tokens
                    else RequestStatus.PREFILL
                )
                request.steps_waited = request.times_passed = 0
            if len(passed) == MOST_PASSES or any(other.times_passed >= MOST_PASSES for other in passed.values()):
                return

    def _can_admit(self, request: SchedulerRequest, behind: int, step: Step) -> bool:
        if not any(True for _ in self._running()):
            self._release_prefixes(request, step)
            return True
        if self._schedule is not None and request.status is RequestStatus.WAITING and not request.is_shared_prefix:
            waiting = sum(other.num_answers for other in self._in((RequestStatus.WAITING,)))
            if not self._schedule.can_start(waiting):
                return False
        unread = [
            j.num_prompt_tokens - j.num_computed_tokens
            for j in self._in((RequestStatus.PREFILL,))
            if j.queue_key < request.queue_key
        ]
        soon = sum(unread) < self.step_tokens and len(unread) < MOST_PIECES
        return not self._closed and self._fits(request, behind) and (soon or request.status is RequestStatus.PREEMPTED)

    def _release_prefixes(self, request: SchedulerRequest, step: Step) -> None:
        """Release shared prefixes, the newest first, until a request fits where nothing runs; none that it begins
        with."""
        own: set[SchedulerRequest] = set()
        above = request.prefix
        while above is not None:
            own.add(above)
            above = above.prefix
        for shared_prefix in sorted(self._in((RequestStatus.PINNED,)), key=lambda one: one.arrival, reverse=True):
            if self._fits(request):
                return
            if shared_prefix not in own:
                shared_prefix.status = RequestStatus.RELEASED
                step.release.append(shared_prefix)

    def _fits(self, request: SchedulerRequest, behind: int = 0) -> bool:
        num_answers = sum(j.num_answers for j in self._running())
        fits = self._promised is None or self._reserved_with(request) + behind <= self._promised
        return fits and num_answers + request.num_answers <= self.most_running

    def _reserved_with(self, request: SchedulerRequest) -> int:
        """Bytes that are kept for the running requests, for shared prefixes, and for one more."""
        if self._schedule is None:
            return self.reserved_bytes + request.reserved_bytes
        return peak_bytes([request, *self._in((RequestStatus.PREFILL, RequestStatus.DECODE, RequestStatus.PINNED))])

    def _not_running(self) -> list[SchedulerRequest]:
        """Return the waiting and the preempted requests, in the order in which they are to start."""
        return self._ordered((RequestStatus.WAITING, RequestStatus.PREEMPTED))

    def _ordered(self, states: tuple[RequestStatus, ...]) -> list[SchedulerRequest]:
        return sorted(self._in(states), key=lambda request: request.queue_key)

    def _running(self) -> Iterable[SchedulerRequest]:
        return self._in((RequestStatus.PREFILL, RequestStatus.DECODE))

    def _in(self, states: tuple[RequestStatus, ...]) -> Iterable[SchedulerRequest]:
        return (request for request in self._requests.values() if request.status in states)


def _unthrottled_clients(running: Iterable[SchedulerRequest]) -> set[ClientService]:
    """The clients whose answers decode at every step: first those with few, then those who have had less service, as
    long as there are at most `MOST_UNTHROTTLED` besides those of the first."""
    rows: dict[ClientService, int] = {}
    for request in running:
        rows[request.client] = rows.get(request.client, 0) + request.num_answers
    unthrottled: set[ClientService] = set()
    answers = 0
    for client in sorted(rows, key=lambda one: (rows[one].bit_length() // 2, *one.queue_key)):
        answers += rows[client] * bool(unthrottled)
        if answers > MOST_UNTHROTTLED:
            break
        unthrottled.add(client)
    return unthrottled
