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
        stays: Whether it decodes where it is read, whatever the role of that worker.
    """

    request: Request
    stays: bool = False


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """The new part of one answer.

    Attributes:
        first: Index of its first token here.
        tokens: Ids of its tokens from there.
        begin: Index of the character at which the new text begins.
        text: The new text.
        logprobs: Of the new tokens, as of `Completion`.
        finish_reason: As of `Completion`.
        stop_reason: As of `Completion`.
        kv: As of `Completion`.
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
        name: Name of the request in the worker's engine.
        answers: New parts of its answers, in order.
        prompt_ids: In the first update of a worker; else None.
        prompt_logprobs: In the first update of a worker; else None.
        started_s: Seconds since it started; None: it has not.
        first_token_s: Seconds since its first token; None: there is none.
        offered: Bytes that wait for another worker to take the request over; None: it runs here.
        dropped: Whether it left the engine and its bytes could not be kept: it has to be restarted.
        finished: Whether this is the last update.
        error: Name of an error's class and its message; None: all is well.
        read: See `RequestOutput`.
        cached: See `RequestOutput`.
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
        updates: New parts of its requests.
        stats: Statistics of its engine.
        trouble: Why its engine does not move; None: all is well.
        handoff_bytes: Bytes that wait for other workers.
        step_age_s: Seconds since the step began that its engine is at; 0 where it waits.
        busy_s: Seconds that all its steps took.
    """

    updates: tuple[RequestDelta, ...]
    stats: EngineStats
    trouble: str | None = None
    handoff_bytes: int = 0
    step_age_s: float = 0.0
    busy_s: float = 0.0


class ReportedOutput:
    """How much of a request was reported, so that the next update holds the rest."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int]] = {}  # of each answer, tokens and characters
        self._prompt = True

    def update(self, output: RequestOutput, now: float) -> RequestDelta:
        """Return the new part of an output.

        Args:
            output: The output.
            now: Time on the clock of its times, in seconds.
        """
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
    """Return the last update of a request that an error ended."""
    kind = next((k.__name__ for k in type(error).__mro__ if getattr(millpond.errors, k.__name__, None) is k), "")
    return RequestDelta(name, finished=True, error=(kind, str(error) if kind else f"the worker failed: {error!r}"))


def error_of(update: RequestDelta) -> MillpondError | None:
    """Return the error of an update, of the class that it had in the worker."""
    if update.error is None:
        return None
    kind = getattr(millpond.errors, update.error[0], MillpondError)
    return kind(update.error[1]) if issubclass(kind, MillpondError) else MillpondError(update.error[1])
