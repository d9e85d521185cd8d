"""DistServe's own simulation, rule by rule, as a check of ours against the table that its code gives.

Its rules differ from ours: a move costs nothing, a step costs 2 ms and 0.1 us a token more, batches of prompts and
answers have no memory but a cap of 50,000 tokens, and time per token is divided by all tokens of an answer.

Source: simdistserve of LLMServe/DistServe; DistServe, arXiv:2401.09670.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millpond_lab.cluster_plan.layout import STAGE_S
from millpond_lab.cluster_plan.profile import StepLoad, StepTimes
from millpond_lab.cluster_plan.simulate import PlannedRequest

#: Tokens of a batch of answers; and of a batch of prompts on one device of OPT-13B, which no trace here reaches.
DECODE_TOKENS, PROMPT_TOKENS = 50_000, 66_144
#: Seconds that a step costs more in the first stage, and for each token of context.
STEP_S, TOKEN_S = 2e-3, 1e-7


@dataclass(slots=True, eq=False)
class _SimulatedRequest:
    """A request under way; `done` tokens of its answer, and when the first one and the last one came."""

    request: PlannedRequest
    done: int = 0
    first: float = -1.0
    last: float = -1.0

    @property
    def context(self) -> int:
        return self.request.prompt + self.done


@dataclass(slots=True, eq=False)
class _Stage:
    """One of the stages of a pipeline, with what waits in front of it: batches of prompts, and answers."""

    times: StepTimes
    stages: int
    rank: int
    busy: bool = False
    prompts: deque[tuple[int, _SimulatedRequest]] = field(default_factory=deque)  # with the number of their batch
    answers: deque[_SimulatedRequest] = field(default_factory=deque)


class Published:
    """One run: a pipeline that reads prompts and, if there is one, another that decodes.

    Args:
        read, decode: step times and stages of each pipeline; `decode` None: the same pipeline decodes, after prompts.
    """

    def __init__(self, read: tuple[StepTimes, int], decode: tuple[StepTimes, int] | None) -> None:
        self._read = [_Stage(read[0], read[1], rank) for rank in range(read[1])]
        self._decode = self._read if decode is None else [_Stage(decode[0], decode[1], n) for n in range(decode[1])]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._batches = 0
        self._now = 0.0

    def run(self, requests: Sequence[PlannedRequest]) -> list[tuple[float, float]]:
        """(seconds to the first token, seconds per token) of each request, in their order."""
        flights = [_SimulatedRequest(request) for request in requests]
        for flight in flights:
            self._at(flight.request.at, self._arrives(flight))
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return [(f.first - f.request.at, (f.last - f.first) / f.request.output) for f in flights]

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, act))

    def _arrives(self, flight: _SimulatedRequest) -> Callable[[], None]:
        def act() -> None:
            self._read[0].prompts.append((-1, flight))
            self._wake(self._read[0])

        return act

    def _wake(self, stage: _Stage) -> None:
        """Let a stage that waits look at its queues when all that happens at this moment has happened."""
        if not stage.busy:
            stage.busy = True
            self._at(self._now, lambda: self._begin(stage))

    def _begin(self, stage: _Stage) -> None:
        if stage.prompts:
            self._read_batch(stage)
        elif stage.answers:
            self._decode_batch(stage)
        else:
            stage.busy = False

    def _read_batch(self, stage: _Stage) -> None:
        batch: list[_SimulatedRequest] = []
        room = PROMPT_TOKENS
        self._batches += stage.rank == 0
        name = self._batches if stage.rank == 0 else stage.prompts[0][0]
        while stage.prompts:
            of, flight = stage.prompts[0]
            if (stage.rank and of != name) or flight.request.prompt > room:
                break
            stage.prompts.popleft()
            room -= 0 if stage.rank else flight.request.prompt
            batch.append(flight)
        lengths = [flight.request.prompt for flight in batch]
        took = stage.times.seconds(StepLoad(sum(lengths), sum(n * n for n in lengths), len(lengths)))
        took = took / stage.stages + STAGE_S * stage.stages + self._overhead(stage, sum(lengths))
        self._at(self._now + took, lambda: self._end_read(stage, batch, name))

    def _end_read(self, stage: _Stage, batch: list[_SimulatedRequest], name: int) -> None:
        if stage.rank + 1 < stage.stages:
            following = self._read[stage.rank + 1]
            following.prompts.extend((name, flight) for flight in batch)
            self._wake(following)
        else:
            for flight in batch:
                flight.first = self._now
            self._decode[0].answers.extend(batch)
            self._wake(self._decode[0])
        self._begin(stage)

    def _decode_batch(self, stage: _Stage) -> None:
        batch: list[_SimulatedRequest] = []
        room = DECODE_TOKENS
        while stage.answers and stage.answers[0].context + 1 <= room:
            flight = stage.answers.popleft()
            room -= flight.context + 1
            batch.append(flight)
        contexts = sum(flight.context for flight in batch)
        took = stage.times.seconds(StepLoad(answers=len(batch), entries=contexts + len(batch))) / stage.stages
        self._at(self._now + took + self._overhead(stage, contexts), lambda: self._end_decode(stage, batch))

    def _end_decode(self, stage: _Stage, batch: list[_SimulatedRequest]) -> None:
        last = stage.rank + 1 == stage.stages
        if last:
            for flight in batch:
                flight.done += 1
                flight.last = self._now
        following = self._decode[0 if last else stage.rank + 1]
        following.answers.extend(flight for flight in batch if flight.done < flight.request.output)
        if following is not stage:
            self._wake(following)
        self._begin(stage)

    def _overhead(self, stage: _Stage, tokens: int) -> float:
        return 0.0 if stage.rank else STEP_S + TOKEN_S * tokens
