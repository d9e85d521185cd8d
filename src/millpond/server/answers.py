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
from millpond.server.usage import choice_figures, for_chat, for_completions, openai_reason, usage


class EventWriter(Protocol):
    """Writes the events of one streamed answer, each as the text that is sent."""

    def more(self, place: int, output: RequestOutput) -> Iterator[str]:
        """Yield what is new in the answer to prompt `place`."""
        ...

    def end(self) -> Iterator[str]:
        """Yield the end, after all answers have ended."""
        ...

    def fail(self, error: ApiError) -> Iterator[str]:
        """Yield an error that ended the answer, when the status was long sent."""
        ...


class ApiCall(Protocol):
    """One call of the API: the requests to answer, and the form of the answer.

    Attributes:
        requests: One per prompt.
        stream: Whether the answer is sent as events.
    """

    @property
    def requests(self) -> Sequence[Request]: ...

    @property
    def stream(self) -> bool: ...

    def whole(self, model: str, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer of a model of that name; one output per prompt."""
        ...

    def events(self, model: str) -> EventWriter:
        """Return the writer of the answer as events."""
        ...


def event_text(data: dict[str, Any], name: str | None = None) -> str:
    r"""Return a server-sent event.

    Example:
        >>> event_text({"a": 1}, "x")
        'event: x\ndata: {"a":1}\n\n'
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"


@dataclass(slots=True)
class StreamCursor:
    """Sent part of one answer.

    Attributes:
        characters: Characters that were sent.
        tokens: Tokens that were sent.
        begun: Whether anything was sent.
        ended: Whether all of it was sent.
        reading: State of a format that reads calls out of the text.
    """

    characters: int = 0
    tokens: int = 0
    begun: bool = False
    ended: bool = False
    reading: Any = None

    def update(self, completion: Completion) -> None:
        """Record that the client has all that there is."""
        self.begun, self.ended = True, completion.finish_reason is not None
        self.characters, self.tokens = len(completion.text), len(completion.token_ids)


class ResponseFormat(Protocol):
    """Form of answers of one of OpenAI's two interfaces.

    Attributes:
        kind: The `object` of an answer.
        chunk_kind: The `object` of a piece of it.
        new_tokens: Off where none were requested.
    """

    @property
    def kind(self) -> str: ...

    @property
    def chunk_kind(self) -> str: ...

    @property
    def new_tokens(self) -> bool: ...

    def choice(self, place: int, output: RequestOutput, completion: Completion) -> dict[str, Any]:
        """Return a whole answer to prompt `place`."""
        ...

    def pieces(
        self, place: int, output: RequestOutput, completion: Completion, sent: StreamCursor
    ) -> list[dict[str, Any]]:
        """Return what is new since `sent`, and update it."""
        ...


def end_of(completion: Completion) -> dict[str, Any]:
    """Return the reason of the end, with what only Millpond tells of it, once there is one."""
    ended = completion.finish_reason is not None
    return {"finish_reason": openai_reason(completion)} | ({"millpond": choice_figures(completion)} if ended else {})


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """POST /v1/completions.

    Attributes:
        n: Answers per prompt.
        logprobs: Whether log probabilities are sent.
        new_tokens: Whether more than the echo is sent.
        echo: Per prompt its text and the text of its first token, which has no log probability; () for no echo.
        token_ids: Tell the ids of new tokens; for models without a tokenizer, whose answers have no text.
        kind: The `object` of an answer.
        chunk_kind: The `object` of a piece of it.
    """

    n: int = 1
    logprobs: bool = False
    new_tokens: bool = True
    echo: Sequence[tuple[str, str]] = field(default_factory=tuple)
    token_ids: bool = False
    kind: str = "text_completion"
    chunk_kind: str = "text_completion"

    def choice(self, place: int, output: RequestOutput, completion: Completion) -> dict[str, Any]:
        """Return a whole answer to prompt `place`."""
        pieces = self.pieces(place, output, completion, StreamCursor())
        assert len(pieces) == 1, "whole answers have ended"
        return pieces[0]

    def pieces(
        self, place: int, output: RequestOutput, completion: Completion, sent: StreamCursor
    ) -> list[dict[str, Any]]:
        """Return what is new since `sent`; the first piece begins with the echo."""
        echoes = bool(self.echo) and not sent.begun
        text = completion.text[sent.characters :] if self.new_tokens else ""
        ids = completion.token_ids[sent.tokens :] if self.new_tokens else ()
        ended = completion.finish_reason is not None
        if not (echoes or text or ended or ((self.logprobs or self.token_ids) and ids)):
            return []
        logprobs = self._logprobs(place, output, completion, sent, echoes, ids) if self.logprobs else None
        if echoes:
            text = self.echo[place][0] + text
        sent.update(completion)
        index = place * self.n + completion.index
        piece = {"index": index, "text": text, "logprobs": logprobs} | end_of(completion)
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
        entries = list((completion.logprobs or ())[sent.tokens :][: len(ids)])
        texts = [entry.text for entry in entries]
        if not echoes:
            text = "" if sent.tokens else completion.text
            return for_completions(ids, entries, texts, prompt + sent.characters, text)
        before = output.prompt_logprobs or ()
        prompt_texts = [self.echo[place][1] if entry is None else entry.text for entry in before]
        return for_completions(
            [*output.prompt_token_ids, *ids], [*before, *entries], prompt_texts + texts, 0, self.echo[place][0]
        )


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """POST /v1/chat/completions.

    Attributes:
        logprobs: whether they are sent.
    """

    logprobs: bool = False
    new_tokens: bool = True
    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"

    def choice(self, place: int, output: RequestOutput, completion: Completion) -> dict[str, Any]:
        """Return a whole answer."""
        return {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": for_chat(completion.logprobs or ()) if self.logprobs else None,
        } | end_of(completion)

    def pieces(
        self, place: int, output: RequestOutput, completion: Completion, sent: StreamCursor
    ) -> list[dict[str, Any]]:
        """Return what is new since `sent`: the role first, the reason of the end last."""
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
        name: Id of the answer.
        requests: One per prompt.
        response_format: Form of the answer.
        stream: Whether the answer is sent as chunks.
        include_usage: End a stream with the numbers.
        created: Seconds since 1970.
    """

    name: str
    requests: list[Request]
    response_format: ResponseFormat
    stream: bool = False
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, model: str, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [
            self.response_format.choice(place, output, completion)
            for place, output in enumerate(answers)
            for completion in output.completions
        ]
        figures = usage(answers, self.response_format.new_tokens)
        return self.envelope(self.response_format.kind, model) | {"choices": choices, "usage": figures}

    def events(self, model: str) -> Chunks:
        """Return the writer of the answer as chunks."""
        return Chunks(self, model)

    def envelope(self, kind: str, model: str) -> dict[str, Any]:
        """Return the fields that an answer and each of its chunks begin with."""
        return {"id": self.name, "object": kind, "created": self.created, "model": model}


class Chunks:
    """The chunks of one answer."""

    def __init__(self, api_call: ChoicesCall, model: str) -> None:
        self._api_call = api_call
        self._envelope = api_call.envelope(api_call.response_format.chunk_kind, model) | (
            {"usage": None} if api_call.include_usage else {}
        )
        self._sent: dict[tuple[int, int], StreamCursor] = {}
        self._last: dict[int, RequestOutput] = {}
        self._read: dict[int, int] = {}

    def more(self, place: int, output: RequestOutput) -> Iterator[str]:
        """Yield a chunk for each choice with something new, after the progress if requested."""
        self._last[place] = output
        if self._api_call.requests[place].tell_read:
            if output.read != self._read.get(place):
                self._read[place] = output.read
                yield event_text(self._envelope | {"choices": [], "prompt_progress": progress(place, output)})
            if not output.finished and not any(one.token_ids for one in output.completions):
                return
        for completion in output.completions:
            so_far = self._sent.setdefault((place, completion.index), StreamCursor())
            if not so_far.ended:
                for piece in self._api_call.response_format.pieces(place, output, completion, so_far):
                    yield event_text(self._envelope | {"choices": [piece]})

    def end(self) -> Iterator[str]:
        """Yield the numbers, where they are wanted, and the mark of the end."""
        if self._api_call.include_usage:
            answers = [self._last[place] for place in sorted(self._last)]
            yield event_text(
                self._envelope | {"choices": [], "usage": usage(answers, self._api_call.response_format.new_tokens)}
            )
        yield "data: [DONE]\n\n"

    def fail(self, error: ApiError) -> Iterator[str]:
        """Yield the error, and nothing after it."""
        yield event_text(error.body())


def progress(place: int, output: RequestOutput) -> dict[str, int]:
    """Return how far prompt `place` is read, in the words of llama.cpp's server.

    These are tokens, and milliseconds since it began.
    """
    started = output.times.started
    return {
        "index": place,
        "total": len(output.prompt_token_ids),
        "cache": output.cached,
        "processed": output.read,
        "time_ms": 0 if started is None else round(1000 * (time.monotonic() - started)),
    }
