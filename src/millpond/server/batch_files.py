"""Batch files: which request each line holds, and the run that skips what was answered before."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from millpond.engine.async_llm import AsyncLLM
from millpond.engine.batch_plan import BatchPlan
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.errors import DataError, MillpondError
from millpond.server.answers import ChoicesCall
from millpond.server.errors import ApiError, of_validation
from millpond.server.routes import chat, completions
from millpond.server.schemas import ChatBody, CompletionBody, SamplingFields
from millpond.server.service import Service
from millpond.server.settings import ServerSettings

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
        """Return the line of the file of errors."""
        said = self.error.body()["error"]
        return {"custom_id": self.custom_id, "line": self.number, "response": None, "error": said}


def read_lines(lines: Iterable[bytes]) -> Iterator[BatchLine | RefusedLine]:
    """Yield every line that is not blank; the second of two with one `custom_id` is refused."""
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


@dataclass(frozen=True, slots=True)
class BatchCount:
    """Numbers of lines of a file.

    Attributes:
        answered: Lines whose answers were written now.
        before: Lines that had theirs.
        refused: Lines in the file of errors.
    """

    answered: int
    before: int
    refused: int


class BatchFile:
    """The requests of one file, checked.

    Args:
        llm: The engine.
        settings: Limits of what a request may ask for.

    Attributes:
        calls: Each line that can be answered, and its requests.
        refused: The other lines.
        n_before: Number of lines with answers.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self._llm = llm
        self._service = Service(llm, settings)
        self.calls: list[tuple[BatchLine, ChoicesCall]] = []
        self.refused: list[RefusedLine] = []
        self.n_before = 0

    async def read(self, path: Path, done: set[str]) -> None:
        """Check every line of a file but those whose names are `done`.

        Raises:
            DataError: it cannot be read.
        """
        try:
            with path.open("rb") as file:
                for line in read_lines(file):
                    if isinstance(line, RefusedLine):
                        self.refused.append(line)
                    elif line.custom_id in done:
                        self.n_before += 1
                    else:
                        await self._check(line)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error

    async def plans(self) -> list[tuple[str, BatchPlan]]:
        """Return what will be read once, of each kind of cache; with its method. Runs nothing."""
        kinds: dict[str, list[Request]] = {}
        for _, api_call in self.calls:
            for request in api_call.requests:
                kinds.setdefault(repr((request.cache, request.cache_salt)), []).append(request)
        plans = []
        for alike in kinds.values():
            plan = await self._llm.call(partial(Engine.plan_batch, requests=alike))
            plans.append((str(alike[0].cache.method or self._llm.cache.method), plan))
        return plans

    async def run(self, out: Path, errors: Path) -> BatchCount:
        """Write an answer behind `out` as soon as it is there, and what was refused to `errors`.

        Raises:
            DataError: a file cannot be written.
        """
        lines = {
            request.request_id: place for place, (_, api_call) in enumerate(self.calls) for request in api_call.requests
        }
        got: dict[int, dict[str, RequestOutput]] = {}
        answered = 0
        try:
            with out.open("ab") as file:
                async for output in self._llm.batch(
                    [request for _, api_call in self.calls for request in api_call.requests]
                ):
                    place = lines[output.request_id]
                    line, api_call = self.calls[place]
                    by_request = got.setdefault(place, {})
                    by_request[output.request_id] = output
                    if len(by_request) < len(api_call.requests):
                        continue
                    outputs = [got[place][request.request_id] for request in api_call.requests]
                    del got[place]
                    failed = next((one.error for one in outputs if one.error is not None), None)
                    if failed is None:
                        _append(file, _record(line, api_call, self._llm.model_name, outputs))
                        answered += 1
                    else:
                        self.refused.append(RefusedLine(line.number, line.custom_id, ApiError.of(failed)))
            _write_errors(errors, self.refused)
        except OSError as error:
            raise DataError(f"{error.filename or out} cannot be written: {error.strerror}") from error
        return BatchCount(answered, self.n_before, len(self.refused))

    def close(self) -> None:
        """Let the threads of the tokenizer go."""
        self._service.tokens.close()
        self._service.bodies.close()
        self._service.images.close()

    async def _check(self, line: BatchLine) -> None:
        body = line.body
        try:
            if isinstance(body, ChatBody):
                api_call = await chat.call_of(self._service, body)
            else:
                api_call = await completions.call_of(self._service, body)
            for request in api_call.requests:
                await self._llm.call(partial(Engine.check, request=request))
        except ApiError as error:
            self.refused.append(RefusedLine(line.number, line.custom_id, error))
        except MillpondError as error:
            self.refused.append(RefusedLine(line.number, line.custom_id, ApiError.of(error)))
        else:
            self.calls.append((line, api_call))


def answered_in(out: Path) -> set[str]:
    """Return names of the lines that have answers in a file of an earlier run.

    A last line that was torn is cut off.

    Raises:
        DataError: the file cannot be read or mended, or holds other lines than answers of a batch.
    """
    done: set[str] = set()
    try:
        if not out.exists():
            return done
        whole = 0
        with out.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break
                whole += len(raw)
                try:
                    done.add(json.loads(raw)["custom_id"])
                except (ValueError, TypeError, KeyError):
                    raise DataError(
                        f"line {number} of {out} is no answer of a batch; give --out another file, or repair this one"
                    ) from None
        if whole < out.stat().st_size:
            os.truncate(out, whole)
    except OSError as error:
        raise DataError(f"{out} cannot be read: {error.strerror}") from error
    return done


def _record(line: BatchLine, api_call: ChoicesCall, model: str, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    response = {"status_code": 200, "request_id": api_call.name, "body": api_call.whole(model, outputs)}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}


def _append(file: Any, record: dict[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    file.flush()


def _write_errors(path: Path, refused: Sequence[RefusedLine]) -> None:
    """Write the errors of this run; without any there is no file."""
    if not refused:
        path.unlink(missing_ok=True)
        return
    with path.open("wb") as file:
        for line in sorted(refused, key=lambda one: one.number):
            _append(file, line.record())
