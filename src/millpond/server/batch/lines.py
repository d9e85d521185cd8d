"""Lines of a batch file: which request each holds, or why it holds none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from millpond.server.errors import ApiError, of_validation
from millpond.server.schemas import ChatBody, CompletionBody, SamplingFields

#: Which body each address takes.
KINDS: dict[str, type[CompletionBody] | type[ChatBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
}
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of the file; number: of its line, from 1."""

    number: int
    custom_id: str
    body: CompletionBody | ChatBody


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A line without a request that could be answered; custom_id: None where it has none."""

    number: int
    custom_id: str | None
    error: ApiError

    def record(self) -> dict[str, Any]:
        """What the file of errors says of it."""
        said = self.error.body()["error"]
        return {"custom_id": self.custom_id, "line": self.number, "response": None, "error": said}


def read_lines(lines: Iterable[bytes]) -> Iterator[BatchLine | RefusedLine]:
    """Every line that is not blank; the second of two with the same `custom_id` is refused."""
    seen: dict[str, int] = {}
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        custom_id = None
        try:
            line = _object(raw)
            custom_id = _custom_id(line)
            if custom_id in seen:
                raise _refused(f"custom_id {custom_id!r} is that of line {seen[custom_id]} too", "custom_id")
            seen[custom_id] = number
            yield BatchLine(number, custom_id, _body(line))
        except ApiError as error:
            yield RefusedLine(number, custom_id, error)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the line is no JSON: {error}", "invalid_json") from None
    if not isinstance(line, dict):
        raise _refused("the line must be a JSON object", None)
    for name in line:
        if name not in _FIELDS:
            raise _refused(f"unknown field {name[:80]!r}: a line has {', '.join(_FIELDS)}", name)
    return line


def _custom_id(line: dict[str, Any]) -> str:
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        message = "custom_id is missing: every line needs a text of its own, by which its answer is found"
        raise _refused(message, "custom_id")
    return custom_id


def _body(line: dict[str, Any]) -> CompletionBody | ChatBody:
    if line.get("method", "POST") != "POST":
        raise _refused(f"method {line['method']!r} must be 'POST'", "method")
    url = line.get("url")
    if not isinstance(url, str) or url not in KINDS:
        raise _refused(f"url {url!r} must be one of {', '.join(KINDS)}", "url")
    try:
        body: SamplingFields = KINDS[url].model_validate(line.get("body"))
    except ValidationError as error:
        raise of_validation(error.errors(include_url=False)) from None
    if body.stream:
        raise _refused("stream=true: the answers of a batch are written whole; leave it out", "stream")
    assert isinstance(body, CompletionBody | ChatBody), "one of `KINDS`"
    return body


def _refused(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, "invalid_value", param)
