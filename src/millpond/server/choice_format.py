"""Completions and chats: their choices in an envelope, whole or as chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.server.errors import ApiError
from millpond.server.generation_job import event_text
from millpond.server.response_format import ResponseFormat, StreamCursor
from millpond.server.usage import usage


@dataclass(frozen=True, slots=True)
class ChoicesJob:
    """A completion or a chat.

    Attributes:
        name: the id of the answer. requests: one per prompt. include_usage: end a stream with the numbers.
    """

    name: str
    requests: list[Request]
    voice: ResponseFormat
    stream: bool = False
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, model: str, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            self.voice.choice(place, output, completion)
            for place, output in enumerate(answers)
            for completion in output.completions
        ]
        figures = usage(answers, self.voice.new_tokens)
        return self.envelope(self.voice.kind, model) | {"choices": choices, "usage": figures}

    def events(self, model: str) -> Chunks:
        """What writes the answer as chunks."""
        return Chunks(self, model)

    def envelope(self, kind: str, model: str) -> dict[str, Any]:
        """What an answer and each of its chunks begin with."""
        return {"id": self.name, "object": kind, "created": self.created, "model": model}


class Chunks:
    """The chunks of one answer."""

    def __init__(self, job: ChoicesJob, model: str) -> None:
        self._job = job
        self._envelope = job.envelope(job.voice.chunk_kind, model) | ({"usage": None} if job.include_usage else {})
        self._sent: dict[tuple[int, int], StreamCursor] = {}
        self._last: dict[int, RequestOutput] = {}
        self._read: dict[int, int] = {}

    def more(self, place: int, output: RequestOutput) -> Iterator[str]:
        """A chunk for each choice that has something new; before that the progress of the prompt, where requested."""
        self._last[place] = output
        if self._job.requests[place].tell_read:
            if output.read != self._read.get(place):
                self._read[place] = output.read
                yield event_text(self._envelope | {"choices": [], "prompt_progress": progress(place, output)})
            if not output.finished and not any(one.token_ids for one in output.completions):
                return
        for completion in output.completions:
            so_far = self._sent.setdefault((place, completion.index), StreamCursor())
            if not so_far.ended:
                for piece in self._job.voice.pieces(place, output, completion, so_far):
                    yield event_text(self._envelope | {"choices": [piece]})

    def end(self) -> Iterator[str]:
        """The numbers, where they are wanted, and the mark of the end."""
        if self._job.include_usage:
            answers = [self._last[place] for place in sorted(self._last)]
            yield event_text(self._envelope | {"choices": [], "usage": usage(answers, self._job.voice.new_tokens)})
        yield "data: [DONE]\n\n"

    def fail(self, error: ApiError) -> Iterator[str]:
        """The error, and nothing after it."""
        yield event_text(error.body())


def progress(place: int, output: RequestOutput) -> dict[str, int]:
    """How far prompt `place` is read, in the words of llama.cpp's server: tokens, and milliseconds since it began."""
    started = output.times.started
    return {
        "index": place,
        "total": len(output.prompt_token_ids),
        "cache": output.cached,
        "processed": output.read,
        "time_ms": 0 if started is None else round(1000 * (time.monotonic() - started)),
    }
