"""An answer of /v1/responses: a response with one message, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.engine.outputs import Completion, RequestOutput
from millpond.engine.request import Request
from millpond.server.errors import ApiError
from millpond.server.generation_job import event_text
from millpond.server.logprobs import for_chat
from millpond.server.response_format import StreamCursor
from millpond.server.usage import choice_stats, usage

#: The code of an error in a stream, by its status; OpenAI's words.
_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt", 422: "invalid_prompt"}


@dataclass(frozen=True, slots=True)
class ResponseJob:
    """A response.

    Attributes:
        name: its id. requests: the one request. echo: fields of the request that a response repeats. logprobs: whether
            log probabilities are sent.
    """

    name: str
    requests: list[Request]
    echo: dict[str, Any]
    stream: bool = False
    logprobs: bool = False
    message: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, model: str, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole response."""
        (output,) = answers
        (completion,) = output.completions
        status = _status(completion)
        item = self.item(status, [self.part(completion.text, completion)])
        more: dict[str, Any] = {"completed_at": int(time.time())} if status == "completed" else {}
        if status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        more["millpond"] = choice_stats(completion)
        return self.response(model, status) | {"output": [item], "usage": _usage(output)} | more

    def events(self, model: str) -> ResponseEvents:
        """What writes the response as events."""
        return ResponseEvents(self, model)

    def response(self, model: str, status: str) -> dict[str, Any]:
        """The response without an answer."""
        return {
            "id": self.name, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": None, "model": model, "output": [], "usage": None,
        } | self.echo  # fmt: skip

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The message."""
        return {"id": self.message, "type": "message", "status": status, "role": "assistant", "content": content}

    def part(self, text: str, completion: Completion | None = None) -> dict[str, Any]:
        """The message's text, with the log probabilities of a completion."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs_of(completion)}

    def logprobs_of(self, completion: Completion | None, start: int = 0) -> list[dict[str, Any]]:
        """Those of the tokens from `start` on; none where they are not wanted."""
        if completion is None or not self.logprobs:
            return []
        found: list[dict[str, Any]] = for_chat((completion.logprobs or ())[start:])["content"]
        return found


class ResponseEvents:
    """The events of one response, numbered."""

    def __init__(self, job: ResponseJob, model: str) -> None:
        self._job = job
        self._model = model
        self._sent = StreamCursor()
        self._number = 0
        self._last: RequestOutput | None = None

    def more(self, place: int, output: RequestOutput) -> Iterator[str]:
        """The beginning, once; then new text."""
        job, sent = self._job, self._sent
        (completion,) = output.completions
        self._last = output
        if not sent.begun:
            yield self._event("response.created", response=job.response(self._model, "in_progress"))
            yield self._event("response.in_progress", response=job.response(self._model, "in_progress"))
            yield self._event("response.output_item.added", output_index=0, item=job.item("in_progress", []))
            yield self._in_part("response.content_part.added", part=job.part(""))
        delta, logprobs = completion.text[sent.characters :], job.logprobs_of(completion, sent.tokens)
        sent.update(completion)
        if delta or logprobs:
            yield self._in_part("response.output_text.delta", delta=delta, logprobs=logprobs)

    def end(self) -> Iterator[str]:
        """The message and the response, both whole."""
        job = self._job
        assert self._last is not None, "an answer came"
        whole = job.whole(self._model, [self._last])
        (item,) = whole["output"]
        (part,) = item["content"]
        yield self._in_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._in_part("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ApiError) -> Iterator[str]:
        """The response failed."""
        details = error.body()["error"] | {"code": _CODES.get(error.status, "server_error")}
        yield self._event("response.failed", response=self._job.response(self._model, "failed") | {"error": details})

    def _in_part(self, name: str, **data: Any) -> str:
        return self._event(name, item_id=self._job.message, output_index=0, content_index=0, **data)

    def _event(self, name: str, **data: Any) -> str:
        number, self._number = self._number, self._number + 1
        return event_text({"type": name, "sequence_number": number} | data, name)


def _status(completion: Completion) -> str:
    return "completed" if completion.finish_reason == "stop" else "incomplete"


def _usage(output: RequestOutput) -> dict[str, Any]:
    """The numbers of a chat in the words of responses."""
    found = usage([output])
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": found["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": found["total_tokens"],
        "millpond": found["millpond"],
    }
