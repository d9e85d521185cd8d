"""Answers of completions and chats: their choices, whole or as chunks, and the requests behind one HTTP request."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millpond.engine.outputs import Completion, RequestOutput
from millpond.engine.request import Request
from millpond.server.errors import ApiError
from millpond.server.usage import choice_stats, for_chat, for_completions, openai_reason, usage


class EventWriter(Protocol):
    """Writes the events of one streamed answer, each as the text that is sent."""

    def more(self, place: int, output: RequestOutput) -> Iterator[str]:
        """What is new in the answer to prompt `place`."""
        ...

    def end(self) -> Iterator[str]:
        """All have ended."""
        ...

    def fail(self, error: ApiError) -> Iterator[str]:
        """An error ended it, when the status was long sent."""
        ...


class ApiCall(Protocol):
    """What is to be answered, and how.

    Attributes:
        requests: one per prompt. stream: as events.
    """

    @property
    def requests(self) -> Sequence[Request]: ...

    @property
    def stream(self) -> bool: ...

    def whole(self, model: str, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer of a model of that name; one output per prompt."""
        ...

    def events(self, model: str) -> EventWriter:
        """What writes the answer as events."""
        ...


def event_text(data: dict[str, Any], name: str | None = None) -> str:
    """A server-sent event.

    Example:
        >>> event_text({"a": 1}, "x")
        'event: x\\ndata: {"a":1}\\n\\n'
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"


@dataclass(slots=True)
class StreamCursor:
    """How much of one answer a client has: characters, tokens, whether anything at all, and whether all of it.

    Attributes:
        reading: what a voice remembers that reads calls out of the text.
    """

    characters: int = 0
    tokens: int = 0
    begun: bool = False
    ended: bool = False
    reading: Any = None

    def update(self, completion: Completion) -> None:
        """The client has all that there is."""
        self.begun, self.ended = True, completion.finish_reason is not None
        self.characters, self.tokens = len(completion.text), len(completion.token_ids)


class ResponseFormat(Protocol):
    """Words of one of OpenAI's two interfaces.

    Attributes:
        kind, chunk_kind: the `object` of an answer and of a piece of it. new_tokens: off where none were requested.
    """

    @property
    def kind(self) -> str: ...

    @property
    def chunk_kind(self) -> str: ...

    @property
    def new_tokens(self) -> bool: ...

    def choice(self, place: int, output: RequestOutput, completion: Completion) -> dict[str, Any]:
        """A whole answer to prompt `place`."""
        ...

    def pieces(
        self, place: int, output: RequestOutput, completion: Completion, sent: StreamCursor
    ) -> list[dict[str, Any]]:
        """What is new since `sent`, which it brings up to date."""
        ...


def end_of(completion: Completion) -> dict[str, Any]:
    """The reason, and what only Millpond says, once there is one."""
    ended = completion.finish_reason is not None
    return {"finish_reason": openai_reason(completion)} | ({"millpond": choice_stats(completion)} if ended else {})


@dataclass(frozen=True, slots=True)
class CompletionVoice:
    """POST /v1/completions.

    Attributes:
        n: answers per prompt. logprobs: whether they are sent. new_tokens: whether more than the echo is.
        echo: per prompt its text and the text of its first token, which has no log probability; empty: no echo.
        token_ids: tell the ids of new tokens; for models without a tokenizer, whose answers have no text.
    """

    n: int = 1
    logprobs: bool = False
    new_tokens: bool = True
    echo: Sequence[tuple[str, str]] = field(default_factory=tuple)
    token_ids: bool = False
    kind: str = "text_completion"
    chunk_kind: str = "text_completion"

    def choice(self, place: int, output: RequestOutput, completion: Completion) -> dict[str, Any]:
        """A whole answer to prompt `place`."""
        pieces = self.pieces(place, output, completion, StreamCursor())
        assert len(pieces) == 1, "whole answers have ended"
        return pieces[0]

    def pieces(
        self, place: int, output: RequestOutput, completion: Completion, sent: StreamCursor
    ) -> list[dict[str, Any]]:
        """What is new since `sent`; the first piece begins with the echo."""
        echoes = bool(self.echo) and not sent.begun
        text = completion.text[sent.characters :] if self.new_tokens else ""
        ids = completion.token_ids[sent.tokens :] if self.new_tokens else ()
        ended = completion.finish_reason is not None
        if not (echoes or text or ended or ((self.logprobs or self.token_ids) and ids)):
            return []
        told = self._logprobs(place, output, completion, sent, echoes, ids) if self.logprobs else None
        if echoes:
            text = self.echo[place][0] + text
        sent.update(completion)
        index = place * self.n + completion.index
        piece = {"index": index, "text": text, "logprobs": told} | end_of(completion)
        return [piece | {"token_ids": list(ids)} if self.token_ids else piece]

    def _logprobs(
        self,
        place: int,
        output: RequestOutput,
        completion: Completion,
        sent: StreamCursor,
        echoes: bool,
        ids: Sequence[int],
    ) -> dict[str, Any]:
        prompt = len(self.echo[place][0]) if self.echo else 0
        found = list((completion.logprobs or ())[sent.tokens :][: len(ids)])
        texts = [entry.text for entry in found]
        if not echoes:
            text = "" if sent.tokens else completion.text
            return for_completions(ids, found, texts, prompt + sent.characters, text)
        before = output.prompt_logprobs or ()
        known = [self.echo[place][1] if entry is None else entry.text for entry in before]
        return for_completions(
            [*output.prompt_token_ids, *ids], [*before, *found], known + texts, 0, self.echo[place][0]
        )


@dataclass(frozen=True, slots=True)
class ChatVoice:
    """POST /v1/chat/completions.

    Attributes:
        logprobs: whether they are sent.
    """

    logprobs: bool = False
    new_tokens: bool = True
    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"

    def choice(self, place: int, output: RequestOutput, completion: Completion) -> dict[str, Any]:
        """A whole answer."""
        return {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": for_chat(completion.logprobs or ()) if self.logprobs else None,
        } | end_of(completion)

    def pieces(
        self, place: int, output: RequestOutput, completion: Completion, sent: StreamCursor
    ) -> list[dict[str, Any]]:
        """What is new since `sent`: the role first, the reason of the end last."""
        pieces: list[dict[str, Any]] = []
        if not sent.begun:
            pieces.append(self._piece(completion, {"role": "assistant", "content": ""}))
        text, new = completion.text[sent.characters :], len(completion.token_ids) > sent.tokens
        if text or (self.logprobs and new):
            piece = self._piece(completion, {"content": text})
            if self.logprobs:
                piece["logprobs"] = for_chat((completion.logprobs or ())[sent.tokens :])
            pieces.append(piece)
        if completion.finish_reason is not None:
            pieces.append(self._piece(completion, {}) | end_of(completion))
        sent.update(completion)
        return pieces

    @staticmethod
    def _piece(completion: Completion, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": completion.index, "delta": delta, "logprobs": None, "finish_reason": None}


@dataclass(frozen=True, slots=True)
class ChoicesCall:
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

    def __init__(self, job: ChoicesCall, model: str) -> None:
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
