"""Scheduler: chooses the requests of the next step, and those that wait or are preempted.

It knows numbers only: tokens to read, bytes that a request will hold, clients, priorities and deadlines. It sees no
model, no page and no clock; the caller reports how long its steps took.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from millpond.engine.diagonal_schedule import DiagonalSchedule, peak_bytes
from millpond.engine.fairness import ClientService, FairQueue, StepThrottle
from millpond.engine.scheduler_request import RequestStatus, SchedulerRequest
from millpond.errors import OptionError

#: Inverse share of a step's tokens that prompts always get. It is also their limit while a client that has received
#: less service decodes, so that long prefill passes do not delay its next tokens.
READING_SHARE = 8
#: Prompts that a step reads, however short they are; and throttled ones where other clients decode, for whom one may
#: take as long as five steps.
MAX_PIECES, THROTTLED_PIECES = 32, 2
#: Tokens of service that a prompt counts for in addition to its own: one of two tokens takes as long as several steps.
PROMPT_SERVICE = 16
#: Answers of other clients that decode with one client's at any time; more decode in turns. With a small model on a
#: CPU, a step of eight takes half as long again as a step of one.
MAX_UNTHROTTLED = 8
#: Requests of other clients that may begin before one that does not fit.
MAX_PASSES = 16
#: Steps that a request waits before it preempts a client that has received more service, but less than a step's tokens
#: more.
PATIENCE = 8
#: Clients whose first waiting requests may preempt running ones in a step.
_TRIES = 4


@dataclass(slots=True)
class Step:
    """Requests that run next.

    Attributes:
        release: Shared prefixes to release, before all else.
        preempt: Requests to preempt, swapped out first.
        resume: Requests to resume, swapped in.
        decodes: Requests whose answers each get a token.
        prefills: Requests, and how many tokens of their prompts are read.
        runs_throttled: Whether throttled requests take part (see `StepThrottle`); False: they pass this step; None:
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

    The order is by priority, then by the client that has received less service, then by arrival. A request begins when
    what it may hold fits besides the reserve of running requests and of shared prefixes, and when the shared prefix
    that it begins with is read. Requests of a better priority preempt running ones; so do those of a client that has
    received less service than another and holds less than that one. The first request in the queue is passed by few
    others, and by none of its own client except while it waits for its shared prefix, so none starves.

    Requests of a planned batch are admitted by memory alone where it is limited: what they may hold, the shared
    prefixes, and the activations of their rows. Those that decode leave all tokens of a step to prompts (memory-centric
    token batching of BatchLLM, Zheng et al., 2024).

    Args:
        limit_bytes: Limit of the pages of all requests, in bytes; None for no limit.
        step_tokens: Tokens of one step, where prompts are read.
        max_running: Most sequences that run at a time.
        overcommit: How often the limit may be promised; more than 1 counts on answers that end early, and preempts the
            newest requests when they do not.
        prompt_block: Prompts are cut at multiples of this many tokens only; None: wherever a step is full.
        spread: Count requests with what they hold at their ages, and start them spread evenly: see `DiagonalSchedule`.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        *,
        step_tokens: int = 512,
        max_running: int = 256,
        overcommit: float = 1.0,
        prompt_block: int | None = None,
        spread: bool = False,
    ) -> None:
        for name, value in (("step_tokens", step_tokens), ("max_running", max_running), ("overcommit", overcommit)):
            if not value >= 1:
                raise OptionError(f"{name}={value} must be at least 1")
        self.limit_bytes = limit_bytes
        self.step_tokens = step_tokens
        self.max_running = max_running
        self._prompt_block = prompt_block
        self._schedule = DiagonalSchedule(max_running) if spread else None
        self._promised = None if limit_bytes is None else int(limit_bytes * overcommit)
        self._requests: dict[str, SchedulerRequest] = {}
        self._clients = FairQueue()
        self._throttle = StepThrottle()
        self._decoders: set[ClientService] = set()  # that decode at every step
        self._arrivals = 0
        self._closed = False  # a request was preempted because pages ran short: none begins until one ends

    # ------------------------------------------------------------------ requests

    def add(self, request: SchedulerRequest) -> None:
        """Add a request to the queue.

        Its need must fit the limit, and its `num_answers` must not exceed `max_running`.
        """
        assert request.key not in self._requests, f"{request.key} is there already"
        assert self.limit_bytes is None or request.memory_need.peak(request.num_answers) <= self.limit_bytes, (
            "it can never run"
        )
        assert request.num_answers <= self.max_running, "it can never run"
        request.arrival, request.client = self._arrivals, self._clients.add_request(request.client_id)
        self._arrivals += 1
        self._requests[request.key] = request

    @property
    def spreads(self) -> bool:
        """Whether requests count with what they hold at their ages."""
        return self._schedule is not None

    def can_admit_transferred(self, request: SchedulerRequest) -> bool:
        """Return whether a request from another engine may continue here now.

        It must fit besides the reserve of running requests.
        """
        runs = any(True for _ in self._running())
        return not runs or (not self._closed and self._fits(request))

    def remove(self, request: SchedulerRequest) -> None:
        """Remove a request that is finished or cancelled; its pages are free."""
        del self._requests[request.key]
        self._clients.remove_request(request.client)
        self._closed = False

    def add_computed_tokens(self, request: SchedulerRequest, n_tokens: int, *, served: bool = True) -> None:
        """Count tokens of a prompt that were read.

        Args:
            request: The request.
            n_tokens: Tokens that are now in its cache.
            served: Count them as service; False if they were taken over from another request.
        """
        request.num_computed_tokens += n_tokens
        request.client.served += n_tokens * served
        assert request.num_computed_tokens <= request.num_prompt_tokens, "a prompt is read once"
        if request.num_computed_tokens == request.num_prompt_tokens:
            request.status = RequestStatus.PINNED if request.is_shared_prefix else RequestStatus.DECODE
            request.client.served += PROMPT_SERVICE * served

    def set_num_answers(self, request: SchedulerRequest, num_answers: int) -> None:
        """Let only `num_answers` answers of a request continue."""
        request.num_answers = num_answers
        self._closed = False

    def restart(self, request: SchedulerRequest, num_answers: int) -> None:
        """Let a running request wait again.

        It reads its prompt from the first token and continues with `num_answers` answers.
        """
        request.status, request.num_answers, request.is_skippable = RequestStatus.WAITING, num_answers, False
        request.num_computed_tokens = request.num_decoded_tokens = request.times_passed = request.steps_waited = 0
        self._closed = False

    def keep_only(self, step: Step, requests: Collection[SchedulerRequest]) -> None:
        """Run only some of a step's requests in it; the others pass."""
        for request in step.decodes:
            if request not in requests:
                request.client.served -= request.num_answers
                request.num_decoded_tokens -= 1
        step.decodes = [request for request in step.decodes if request in requests]
        step.prefills = [(request, n) for request, n in step.prefills if request in requests]
        step.runs_throttled = None

    def take_back(self, request: SchedulerRequest) -> None:
        """Count one row less of a planned step, of an answer that had ended before it."""
        request.client.served -= 1

    def leave_out_ended(self, step: Step) -> None:
        """Leave the requests out of a step that were removed since it was planned."""
        there = set(self._requests.values())
        step.release = [request for request in step.release if request in there]
        step.preempt = [request for request in step.preempt if request in there]
        step.resume = [request for request in step.resume if request in there]
        step.decodes = [request for request in step.decodes if request in there]
        step.prefills = [(request, n) for request, n in step.prefills if request in there]

    def preempt_newest(self) -> SchedulerRequest | None:
        """Preempt a running request: the newest one of the worst priority.

        No request begins or resumes before another one ends, so that two do not preempt each other at every step.
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
        """Return the requests whose deadline is at or before `now`."""
        return [
            request for request in self._requests.values() if request.deadline is not None and request.deadline <= now
        ]

    def count(self, *states: RequestStatus) -> int:
        """Return the number of requests in these states."""
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
        """Return the requests that run next; those that begin or resume count as running now."""
        step = Step()
        if self._schedule is not None:
            self._schedule.next_step()
        self._preempt_for_waiting(step)
        self._admit(step)
        min_prompt_tokens = max(self.step_tokens // READING_SHARE, 1)
        throttled = self._choose_decodes(step, self._overserved(min_prompt_tokens))
        rows = sum(request.num_answers for request in step.decodes if not request.row_bytes)
        free_tokens = max(self.step_tokens - rows, min_prompt_tokens)
        min_served = min((request.client.served for request in step.decodes), default=None)
        for request in self._ordered((RequestStatus.PREFILL,)):
            if step.runs_throttled is False and request in throttled:
                continue
            pieces = THROTTLED_PIECES if request in throttled and step.decodes else MAX_PIECES
            if min_served is not None and request.client.served - min_served >= self.step_tokens:
                free_tokens = min(free_tokens, min_prompt_tokens - sum(n for _, n in step.prefills))
            n = self._next_chunk_size(request)
            if (
                free_tokens <= 0
                or len(step.prefills) >= pieces
                or (n is not None and n > free_tokens and step.prefills)
            ):
                break
            n = min(request.num_prompt_tokens - request.num_computed_tokens, free_tokens) if n is None else n
            step.prefills.append((request, n))
            free_tokens -= n
        for request in step.decodes:
            request.client.served += request.num_answers
            request.num_decoded_tokens += 1
        return step

    def _next_chunk_size(self, request: SchedulerRequest) -> int | None:
        """Return the tokens of a prompt to read in one pass; None where it may be cut anywhere."""
        remaining = request.num_prompt_tokens - request.num_computed_tokens
        if request.is_uncut:
            return remaining
        block_tokens = request.piece or self._prompt_block
        return (
            None if block_tokens is None else min(remaining, block_tokens - request.num_computed_tokens % block_tokens)
        )

    def record_step_time(self, step: Step, seconds: float) -> None:
        """Record how long a step took."""
        if step.runs_throttled:
            self._throttle.charge(seconds)
        else:
            self._throttle.credit(seconds, bool(step.prefills) or step.runs_throttled is None)

    def _overserved(self, gap: int) -> set[SchedulerRequest]:
        """Return running requests of clients with `gap` tokens more service than another one."""
        min_served = min((request.client.served for request in self._running()), default=0)
        return {request for request in self._running() if request.client.served - min_served >= gap}

    def _choose_decodes(self, step: Step, ahead: set[SchedulerRequest]) -> set[SchedulerRequest]:
        """Add the requests that decode to a step; return the throttled ones among those that read.

        Throttled requests are the answers of clients with far more of them than others, beyond `MAX_UNTHROTTLED`;
        prompts of other clients than those whose answers are not throttled; and prompts in `ahead`, of clients that
        have received more service.
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
        """Preempt running requests for the first waiting request that then fits."""
        tried: dict[ClientService, SchedulerRequest] = {}
        for first in () if self._closed else self._not_running():
            if first.client in tried or first.waits_for_prefix or first.is_loading:
                continue
            preempted: list[tuple[SchedulerRequest, RequestStatus]] = []
            while not self._fits(first) and (worst := self._preemption_candidate(first)) is not None:
                preempted.append((worst, worst.status))
                worst.status = RequestStatus.PREEMPTED
            if self._fits(first):
                step.preempt = [request for request, _ in preempted]
                return
            for request, status in preempted:
                request.status = status
            first.steps_waited += 1
            tried[first.client] = first
            if len(tried) == _TRIES or first.times_passed >= MAX_PASSES:
                return

    def _preemption_candidate(self, first: SchedulerRequest) -> SchedulerRequest | None:
        """Return the running request to preempt for `first`, or None.

        A candidate has a worse priority, or its client has received more service and holds more bytes or answers than
        `first` would; the second condition keeps two clients from preempting each other in turns.
        """
        worst = max(self._running(), key=lambda request: request.queue_key, default=None)
        if worst is None or worst.priority > first.priority:
            return worst
        held_by_client: dict[ClientService, tuple[int, int]] = {first.client: (first.reserved_bytes, first.num_answers)}
        for request in self._running():
            n_bytes, num_answers = held_by_client.get(request.client, (0, 0))
            held_by_client[request.client] = n_bytes + request.reserved_bytes, num_answers + request.num_answers
        own_bytes, own_answers = held_by_client[first.client]
        bytes_fit = self._promised is None or self.reserved_bytes + first.reserved_bytes <= self._promised
        answers_fit = sum(num_answers for _, num_answers in held_by_client.values()) <= self.max_running

        def may_be_preempted(request: SchedulerRequest) -> bool:
            extra_service = request.client.served - first.client.served
            if (
                request.priority < first.priority
                or extra_service <= 0
                or (extra_service < self.step_tokens and first.steps_waited < PATIENCE)
            ):
                return False
            n_bytes, num_answers = held_by_client[request.client]
            return (bytes_fit or n_bytes > own_bytes) and (answers_fit or num_answers > own_answers)

        return max(filter(may_be_preempted, self._running()), key=lambda request: request.queue_key, default=None)

    def _admit(self, step: Step) -> None:
        passed: dict[ClientService, SchedulerRequest] = {}
        # bytes for requests that wait for their shared prefix, and for the shared prefixes before that one
        owed: dict[SchedulerRequest | None, int] = {}
        max_owed = 0  # the largest of those before this request
        for request in self._not_running():
            if request.client in passed or request.is_loading:
                continue
            if request.waits_for_prefix:
                owed[request] = request.reserved_bytes + owed.get(request.prefix, 0)
                max_owed = max(max_owed, owed[request])
            elif request in step.preempt or not self._can_admit(request, max_owed, step):
                passed[request.client] = request
            else:
                for passed_request in passed.values():
                    passed_request.times_passed += 1
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
            if len(passed) == MAX_PASSES or any(
                passed_request.times_passed >= MAX_PASSES for passed_request in passed.values()
            ):
                return

    def _can_admit(self, request: SchedulerRequest, owed_bytes: int, step: Step) -> bool:
        if not any(True for _ in self._running()):
            self._release_prefixes(request, step)
            return True
        if self._schedule is not None and request.status is RequestStatus.WAITING and not request.is_shared_prefix:
            waiting = sum(other.num_answers for other in self._in((RequestStatus.WAITING,)))
            if not self._schedule.can_start(waiting):
                return False
        unread = [
            reader.num_prompt_tokens - reader.num_computed_tokens
            for reader in self._in((RequestStatus.PREFILL,))
            if reader.queue_key < request.queue_key
        ]
        is_read_soon = sum(unread) < self.step_tokens and len(unread) < MAX_PIECES
        return (
            not self._closed
            and self._fits(request, owed_bytes)
            and (is_read_soon or request.status is RequestStatus.PREEMPTED)
        )

    def _release_prefixes(self, request: SchedulerRequest, step: Step) -> None:
        """Release shared prefixes, the newest first, until a request fits where nothing runs.

        Those that it begins with stay.
        """
        own_prefixes: set[SchedulerRequest] = set()
        prefix = request.prefix
        while prefix is not None:
            own_prefixes.add(prefix)
            prefix = prefix.prefix
        for shared_prefix in sorted(self._in((RequestStatus.PINNED,)), key=lambda pinned: pinned.arrival, reverse=True):
            if self._fits(request):
                return
            if shared_prefix not in own_prefixes:
                shared_prefix.status = RequestStatus.RELEASED
                step.release.append(shared_prefix)

    def _fits(self, request: SchedulerRequest, owed_bytes: int = 0) -> bool:
        by_bytes = self._promised is not None
        counted = sum(one.num_answers for one in (*self._running(), request) if not (by_bytes and one.row_bytes))
        fits = self._promised is None or self._reserved_with(request) + owed_bytes <= self._promised
        return fits and counted <= self.max_running

    def _reserved_with(self, request: SchedulerRequest) -> int:
        """Return the bytes kept for running requests, shared prefixes and one more request."""
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
    """Return the clients whose answers decode at every step.

    Those with few answers come first, then those that have received less service, while at most `MAX_UNTHROTTLED`
    answers decode besides those of the first.
    """
    rows: dict[ClientService, int] = {}
    for request in running:
        rows[request.client] = rows.get(request.client, 0) + request.num_answers
    unthrottled: set[ClientService] = set()
    answers = 0
    for client in sorted(rows, key=lambda candidate: (rows[candidate].bit_length() // 2, *candidate.queue_key)):
        answers += rows[client] * bool(unthrottled)
        if answers > MAX_UNTHROTTLED:
            break
        unthrottled.add(client)
    return unthrottled
