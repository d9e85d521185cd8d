"""An answer of /v1/messages: a message of blocks of text and calls of tools, whole or as events."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from millpond.engine.outputs import Completion, RequestOutput
from millpond.engine.request import Request
from millpond.server.answers import StreamCursor, event_text
from millpond.server.errors import ApiError
from millpond.server.tools.reader import Arguments, CallBegins, CallBreaks, CallEnds, Content, Event, pieces_of
from millpond.server.tools.tool_choice import Tools
from millpond.server.usage import choice_figures, openai_reason, usage


@dataclass(frozen=True, slots=True)
class MessagesCall:
    """A message.

    Attributes:
        name: Its id.
        requests: The one request.
        tools: Tools that can be called.
        held: Whether answers are held to `tools.constraint`.
        most: New tokens that the client wants at most.
        stops: Texts that end it.
        stream: Whether it is sent as events.
    """

    name: str
    requests: list[Request]
    tools: Tools | None
    held: bool
    most: int
    stops: tuple[str, ...] = ()
    stream: bool = False

    def whole(self, model: str, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole message."""
        (output,) = answers
        (completion,) = output.completions
        blocks = [
            {"type": "text", "text": piece.text}
            if piece.name is None
            else self.call(piece.name) | {"input": input_of(piece.text)}
            for piece in pieces_of(self._read(completion.text))
        ]
        calls = sum(block["type"] == "tool_use" for block in blocks)
        return self.message(model) | {"content": blocks, "usage": usage_of(output)} | self.end(completion, calls)

    def _read(self, text: str) -> list[Event]:
        """Return the parts of a whole answer."""
        if self.tools is None:
            return [Content(text)] if text else []
        reader = self.tools.reader(self.held)
        return [*reader.add(text), *reader.finish()]

    def events(self, model: str) -> MessageEvents:
        """Return the writer of the message as events."""
        return MessageEvents(self, model)

    def message(self, model: str) -> dict[str, Any]:
        """Return the message without its content."""
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def call(self, name: str) -> dict[str, Any]:
        """Return a call whose arguments follow."""
        assert self.tools is not None, "calls are read where there are tools"
        return {"type": "tool_use", "id": self.tools.format.new_id(), "name": name, "input": {}}

    def end(self, completion: Completion, calls: int) -> dict[str, Any]:
        """Return why the message ended, in Anthropic's words and in ours.

        Args:
            completion: The answer.
            calls: Number of its calls.
        """
        reason = openai_reason(completion)
        stopped = completion.stop_reason if completion.stop_reason in self.stops else None
        if reason == "stop":
            why = "tool_use" if calls else "end_turn" if stopped is None else "stop_sequence"
        else:
            full = completion.finish_reason == "length" and len(completion.token_ids) < self.most
            why = "model_context_window_exceeded" if full else "max_tokens"
        return {"stop_reason": why, "stop_sequence": stopped, "millpond": choice_figures(completion)}


class MessageEvents:
    """The events of one message."""

    def __init__(self, api_call: MessagesCall, model: str) -> None:
        self._api_call = api_call
        self._model = model
        self._sent = StreamCursor()
        self._reader = None if api_call.tools is None else api_call.tools.reader(api_call.held)
        self._open = ""  # the kind of the block that is being written
        self._blocks = self._calls = 0
        self._last: RequestOutput | None = None

    def more(self, place: int, output: RequestOutput) -> Iterator[str]:
        """Yield the beginning, once; then what is new."""
        (completion,) = output.completions
        self._last = output
        if not self._sent.begun:
            message = self._api_call.message(self._model) | {"usage": usage_of(output)}
            yield self._event("message_start", message=message)
            yield self._event("ping")
        text = completion.text[self._sent.characters :]
        self._sent.update(completion)
        if self._reader is None:
            events: list[Event] = [Content(text)] if text else []
        else:
            events = self._reader.add(text)
            if self._sent.ended:
                events += self._reader.finish()
        for event in events:
            yield from self._told(event)

    def _told(self, event: Event) -> Iterator[str]:
        match event:
            case Content(text):
                if self._open != "text":
                    yield from self._begin({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case CallBegins(name):
                yield from self._begin(self._api_call.call(name))
            case Arguments(text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnds():
                self._calls += 1
                yield from self._close()
            case CallBreaks():
                yield from self._close()

    def _begin(self, block: dict[str, Any]) -> Iterator[str]:
        yield from self._close()
        self._open = block["type"]
        yield self._event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return self._event("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> Iterator[str]:
        if self._open:
            yield self._event("content_block_stop", index=self._blocks)
            self._open = ""
            self._blocks += 1

    def end(self) -> Iterator[str]:
        """Yield the end of the last block, the reason, and the numbers."""
        assert self._last is not None, "an answer came"
        yield from self._close()
        end = self._api_call.end(self._last.completions[0], self._calls)
        figures = end.pop("millpond")
        yield self._event("message_delta", delta=end, usage=usage_of(self._last), millpond=figures)
        yield self._event("message_stop")

    def fail(self, error: ApiError) -> Iterator[str]:
        """Yield the error, and nothing after it."""
        yield event_text(error.anthropic_body(), "error")

    @staticmethod
    def _event(name: str, **data: Any) -> str:
        return event_text({"type": name} | data, name)


def input_of(arguments: str) -> Any:
    """Return the values of a call's arguments as JSON can express them.

    Half of a surrogate pair, and a number beyond all floats, cannot be sent.

    Example:
        >>> input_of('{"a": [1e999, 1.5]}')
        {'a': ['1e999', 1.5]}
    """
    return _sendable(json.loads(arguments, parse_float=_number))


def _number(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_sendable(part) for part in value]
    return {_sendable(key): _sendable(part) for key, part in value.items()} if isinstance(value, dict) else value


def usage_of(output: RequestOutput) -> dict[str, Any]:
    """Return the numbers of a chat in Anthropic's words.

    Tokens that others had read do not count as input.
    """
    figures = usage([output])
    cached = min(figures["prompt_tokens_details"]["cached_tokens"], figures["prompt_tokens"])
    return {
        "input_tokens": figures["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": figures["completion_tokens"],
        "millpond": figures["millpond"],
    }
