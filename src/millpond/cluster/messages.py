"""Messages of a worker: what its requests have come to since its last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import millpond.errors
from millpond.engine.outputs import Completion, EngineStats, FinishReason, KVStats, RequestOutput, TokenLogprob
from millpond.engine.request import Request
from millpond.errors import MillpondError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StartMessage:
    """One request for a worker.

    Attributes:
        stays: it decodes where it is read, whatever the role of that worker.
    """

    request: Request
    stays: bool = False


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """The new part of one answer.

    Attributes:
        first: number of its first token here. tokens, logprobs: from there. begin: where the new text begins, in
            characters. The rest: as of `Completion`.
    """

    first: int
    tokens: tuple[int, ...]
    begin: int
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    kv: KVStats | None


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """The new part of one request.

    Attributes:
        name: of the request in the worker's engine. answers: their new parts, in order.
        prompt_ids, prompt_logprobs: in the first update of a worker; else None.
        read, cached: see `RequestOutput`.
        started_s, first_token_s: seconds since these moments; None: they have not come.
        offered: bytes that wait for another worker to take the request over; None: it runs here.
        dropped: it left the engine and its bytes could not be kept: it has to be begun again.
        finished: nothing more comes. error: name of an error's class and its message; None: all is well.
    """

    name: str
    answers: tuple[CompletionDelta, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    offered: int | None = None
    dropped: bool = False
    finished: bool = False
    error: tuple[str, str] | None = None
    read: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One message for all requests of a worker.

    Attributes:
        trouble: why its engine does not move; None: all is well. handoff_bytes: that wait for other workers.
        step_age_s: seconds since the step began that its engine is at; 0 where it waits.
    """

    updates: tuple[RequestDelta, ...]
    stats: EngineStats
    trouble: str | None = None
    handoff_bytes: int = 0
    step_age_s: float = 0.0


class ReportedOutput:
    """How much of a request was reported, so that the next update holds the rest."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int]] = {}  # of each answer, tokens and characters
        self._prompt = True

    def update(self, output: RequestOutput, now: float) -> RequestDelta:
        """The new part of an output. now: on the clock of its times, in seconds."""
        times, first = output.times, self._prompt
        self._prompt = False
        return RequestDelta(
            output.request_id,
            tuple(map(self._answer, output.completions)),
            output.prompt_token_ids if first else None,
            output.prompt_logprobs if first else None,
            None if times.started is None else now - times.started,
            None if times.first_token is None else now - times.first_token,
            finished=output.finished,
            read=output.read,
            cached=output.cached,
        )

    def _answer(self, answer: Completion) -> CompletionDelta:
        first, begin = self._sizes.get(answer.index, (0, 0))
        self._sizes[answer.index] = len(answer.token_ids), len(answer.text)
        return CompletionDelta(
            first,
            answer.token_ids[first:],
            begin,
            answer.text[begin:],
            None if answer.logprobs is None else answer.logprobs[first:],
            answer.finish_reason,
            answer.stop_reason,
            answer.kv,
        )


def failed(name: str, error: Exception) -> RequestDelta:
    """The last update of a request that an error ended."""
    kind = next((k.__name__ for k in type(error).__mro__ if getattr(millpond.errors, k.__name__, None) is k), "")
    return RequestDelta(name, finished=True, error=(kind, str(error) if kind else f"the worker failed: {error!r}"))


def error_of(update: RequestDelta) -> MillpondError | None:
    """The error of an update, of the class that it had in the worker."""
    if update.error is None:
        return None
    kind = getattr(millpond.errors, update.error[0], MillpondError)
    return kind(update.error[1]) if issubclass(kind, MillpondError) else MillpondError(update.error[1])
