"""An answer of /infill, in the words of llama.cpp: one text, whole or as it grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from millpond.engine.outputs import Completion, RequestOutput
from millpond.engine.request import Request
from millpond.server.answers import event_text
from millpond.server.errors import ApiError
from millpond.server.usage import choice_figures, usage


@dataclass(frozen=True, slots=True)
class InfillCall:
    """A text in the middle.

    Attributes:
        requests: The one request.
        indent: White space with which each of its lines begins at least.
        new_tokens: Off where none are wanted.
        fields: Fields that are sent, by their paths; empty for all.
        stops: Texts of the client that end it.
    """

    requests: list[Request]
    indent: int = 0
    new_tokens: bool = True
    fields: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    stream: bool = False

    def whole(self, model: str, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer."""
        return self.last(model, answers[0], self.text(answers[0].completions[0]))

    def events(self, model: str) -> InfillEvents:
        """Return the writer of the answer as events."""
        return InfillEvents(self, model)

    def text(self, completion: Completion) -> str:
        """Return the text so far, up to a line with less indent.

        Of a line whose text has not begun there is nothing.
        """
        return indented(completion.text, self.indent)[0] if self.new_tokens else ""

    def enough(self, output: RequestOutput) -> bool:
        """Whether the rest would be cut off."""
        return indented(output.completions[0].text, self.indent)[1]

    def last(self, model: str, output: RequestOutput, content: str) -> dict[str, Any]:
        """Return the end of an answer, with its numbers.

        Args:
            model: Name of the model.
            output: The output.
            content: Text that was not sent.
        """
        (completion,) = output.completions
        figures = usage([output], self.new_tokens)
        new, cached = figures["completion_tokens"], figures["prompt_tokens_details"]["cached_tokens"]
        stopped = completion.stop_reason if completion.stop_reason in self.stops else None
        kind = "limit" if completion.finish_reason != "stop" else "eos" if stopped is None else "word"
        fields = {
            "index": 0,
            "content": content,
            "id_slot": -1,
            "stop": True,
            "model": model,
            "tokens_predicted": new,
            "tokens_evaluated": figures["prompt_tokens"],
            "tokens_cached": cached,
            "truncated": False,
            "has_new_line": "\n" in self.text(completion),
            "stop_type": kind,
            "stopping_word": stopped or "",
            "timings": _timings(output, figures["prompt_tokens"] - cached, new),
            "millpond": choice_figures(completion),
        }
        return picked(fields, self.fields)


class InfillEvents:
    """The events of one text."""

    def __init__(self, api_call: InfillCall, model: str) -> None:
        self._api_call, self._model = api_call, model
        self._sent = ""
        self._last: RequestOutput | None = None

    def more(self, place: int, output: RequestOutput) -> Iterator[str]:
        """Yield new text."""
        self._last = output
        text = self._api_call.text(output.completions[0])
        if new := text[len(self._sent) :]:
            self._sent = text
            event = {"index": 0, "content": new, "id_slot": -1, "stop": False}
            yield event_text(picked(event, self._api_call.fields))

    def end(self) -> Iterator[str]:
        """Yield the numbers."""
        assert self._last is not None, "an answer came"
        yield event_text(self._api_call.last(self._model, self._last, ""))

    def fail(self, error: ApiError) -> Iterator[str]:
        """Yield the error, and nothing after it."""
        yield event_text(error.body())


def indented(text: str, min_indent: int) -> tuple[str, bool]:
    r"""Return a text up to a line that begins with less white space, and whether there is one.

    The first line does not count. Blank lines count as none, and a line without text yet is left out.

    Example:
        >>> indented("a\n\n  b\nc", 2)
        ('a\n\n  b', True)
    """
    if not min_indent:
        return text, False
    kept, begin = text.find("\n"), text.find("\n") + 1
    if kept < 0:
        return text, False
    while begin <= len(text):
        end = text.find("\n", begin)
        line = text[begin:] if end < 0 else text[begin:end]
        if line.strip():
            if len(line) - len(line.lstrip(" \t")) < min_indent:
                return text[:kept], True
            kept = len(text) if end < 0 else end
        if end < 0:
            break
        begin = end + 1
    return text[:kept], False


def picked(fields: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields of these paths, each under its path.

    Example:
        >>> picked({"a": {"b": 1}, "c": 2}, ["a/b", "d"])
        {'a/b': 1}
    """
    if not paths:
        return fields
    result = {}
    for path in paths:
        value: Any = fields
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            result[path] = value
    return result


def _timings(output: RequestOutput, read: int, new: int) -> dict[str, Any]:
    """Return the milliseconds of the prompt and of the answer."""
    times = output.times
    first, end = times.first_token, times.finished
    spent = {
        "prompt": (read, 0.0 if first is None else first - times.arrived),
        "predicted": (new, 0.0 if first is None or end is None else end - first),
    }
    timings: dict[str, Any] = {}
    for name, (count, seconds) in spent.items():
        timings |= {
            f"{name}_n": count,
            f"{name}_ms": round(1e3 * seconds, 3),
            f"{name}_per_token_ms": round(1e3 * seconds / count, 3) if count else 0.0,
            f"{name}_per_second": round(count / seconds, 3) if seconds else 0.0,
        }
    return timings
