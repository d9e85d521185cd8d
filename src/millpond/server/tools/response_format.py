"""Formats a chat answer whose tool calls are taken out of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millpond.engine.outputs import Completion, RequestOutput
from millpond.server.answers import StreamCursor, end_of
from millpond.server.tools.reader import Arguments, CallBegins, CallEnds, Content, Event, Reader, found_in
from millpond.server.tools.tool_choice import Tools
from millpond.server.usage import for_chat


@dataclass(slots=True)
class _Reading:
    """State of a streamed answer: calls that were begun, and those of them that are complete."""

    reader: Reader
    begun: int = 0
    complete: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """POST /v1/chat/completions where tools can be called.

    A call that breaks off is content in a whole answer; in a stream, where its beginning was sent, it stays unfinished.

    Attributes:
        tools: Tools that can be called.
        held: Whether answers are held to `tools.constraint`.
        logprobs: Whether log probabilities are sent.
        new_tokens: Whether any were requested: always.
        kind: The `object` of an answer.
        chunk_kind: The `object` of a piece of it.
    """

    tools: Tools
    held: bool = False
    logprobs: bool = False
    new_tokens: bool = True
    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"

    def choice(self, place: int, output: RequestOutput, completion: Completion) -> dict[str, Any]:
        """Return a whole answer."""
        reader = self.tools.reader(self.held)
        answer = found_in([*reader.add(completion.text), *reader.finish()])
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [self._call(name, arguments) for name, arguments in answer.calls]
        return {
            "index": completion.index,
            "message": message,
            "logprobs": for_chat(completion.logprobs or ()) if self.logprobs else None,
        } | _end(completion, len(answer.calls))

    def pieces(
        self, place: int, output: RequestOutput, completion: Completion, sent: StreamCursor
    ) -> list[dict[str, Any]]:
        """Return what is new since `sent`: the role first, the reason of the end last."""
        if sent.reading is None:
            sent.reading = _Reading(self.tools.reader(self.held))
        reading: _Reading = sent.reading
        events = reading.reader.add(completion.text[sent.characters :])
        if completion.finish_reason is not None:
            events += reading.reader.finish()
        deltas = [delta for event in events if (delta := self._delta(event, reading)) is not None]
        logprobs = for_chat((completion.logprobs or ())[sent.tokens :]) if self.logprobs else None
        if logprobs is not None and logprobs["content"] and not deltas:
            deltas.append({})
        pieces = [_piece(completion, delta) for delta in deltas]
        if pieces:
            pieces[0]["logprobs"] = logprobs
        if not sent.begun:
            pieces.insert(0, _piece(completion, {"role": "assistant", "content": None}))
        if completion.finish_reason is not None:
            pieces.append(_piece(completion, {}) | _end(completion, reading.complete))
        sent.update(completion)
        return pieces

    def _delta(self, event: Event, reading: _Reading) -> dict[str, Any] | None:
        match event:
            case Content(text):
                return {"content": text}
            case CallBegins(name):
                reading.begun += 1
                return {"tool_calls": [{"index": reading.begun - 1} | self._call(name, "")]}
            case Arguments(text):
                return {"tool_calls": [{"index": reading.begun - 1, "function": {"arguments": text}}]}
            case CallEnds():
                reading.complete += 1
        return None

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        return {
            "id": self.tools.format.new_id(),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


def _piece(completion: Completion, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": completion.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _end(completion: Completion, calls: int) -> dict[str, Any]:
    end = end_of(completion)
    return end | {"finish_reason": "tool_calls"} if calls and end["finish_reason"] == "stop" else end
