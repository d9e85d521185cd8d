"""Requests and answers of /v1/responses: messages and calls of tools, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from millpond.engine.outputs import Completion, RequestOutput
from millpond.engine.request import Request
from millpond.server.answers import StreamCursor, event_text
from millpond.server.errors import ApiError
from millpond.server.messages import (
    LIST,
    MAX_NAME,
    MAX_TOOLS,
    NAMES,
    TEXT,
    Body,
    CalledFunction,
    Function,
    Message,
    Name,
    TextOr,
    Tool,
    ToolCall,
    arguments_of,
    length_of,
    text_or_list,
)
from millpond.server.messages import TextPart as ChatPart
from millpond.server.schemas import ClientNote, ObjectFormat, StreamOptions, TextFormat, TokenFields
from millpond.server.tools.reader import Arguments, CallBegins, CallBreaks, CallEnds, Content, Event, pieces_of
from millpond.server.tools.tool_choice import Tools
from millpond.server.usage import choice_figures, for_chat, usage

#: The code of an error in a stream, by its status; OpenAI's words.
_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt", 422: "invalid_prompt"}


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A response.

    Attributes:
        name: Its id.
        requests: The one request.
        echo: Fields of the request that a response repeats.
        tools: Tools that can be called.
        held: Whether answers are held to `tools.constraint`.
        logprobs: Whether log probabilities are sent.
    """

    name: str
    requests: list[Request]
    echo: dict[str, Any]
    tools: Tools | None = None
    held: bool = False
    stream: bool = False
    logprobs: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, model: str, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole response."""
        (output,) = answers
        (completion,) = output.completions
        if self.tools is None:
            item = self.message() | {"content": [self.part(completion.text, completion)]}
            return self.ended(model, output, [item])
        reader = self.tools.reader(self.held)
        items = [
            self.message() | {"content": [self.part(piece.text)]}
            if piece.name is None
            else self.call(piece.name) | {"arguments": piece.text}
            for piece in pieces_of([*reader.add(completion.text), *reader.finish()])
        ]
        return self.ended(model, output, items or [self.message() | {"content": [self.part("")]}])

    def events(self, model: str) -> ResponseEvents:
        """Return the writer of the response as events."""
        return ResponseEvents(self, model)

    def response(self, model: str, status: str) -> dict[str, Any]:
        """Return the response without an answer."""
        return {
            "id": self.name,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
        } | self.echo

    def ended(self, model: str, output: RequestOutput, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response with the model's items; an answer that is cut off cuts the last one."""
        (completion,) = output.completions
        status = _status(completion)
        for item in items:
            if item["status"] == "in_progress":
                item["status"] = status if item is items[-1] and item["type"] == "message" else "completed"
        more: dict[str, Any] = {"completed_at": int(time.time())} if status == "completed" else {}
        if status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        more["millpond"] = choice_figures(completion)
        return self.response(model, status) | {"output": items, "usage": _usage(output)} | more

    def message(self) -> dict[str, Any]:
        """Return a message that begins."""
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }

    def call(self, name: str) -> dict[str, Any]:
        """Return a call that begins."""
        assert self.tools is not None, "calls are read where there are tools"
        return {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": self.tools.format.new_id(),
            "name": name,
            "arguments": "",
        }

    def part(self, text: str, completion: Completion | None = None) -> dict[str, Any]:
        """Return a message's text, with the log probabilities of a completion."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs_of(completion)}

    def logprobs_of(self, completion: Completion | None, start: int = 0) -> list[dict[str, Any]]:
        """Return the log probabilities of tokens from `start` on; none where they are not wanted."""
        if completion is None or not self.logprobs:
            return []
        entries: list[dict[str, Any]] = for_chat((completion.logprobs or ())[start:])["content"]
        return entries


class ResponseEvents:
    """The events of one response, numbered."""

    def __init__(self, api_call: ResponsesCall, model: str) -> None:
        self._api_call = api_call
        self._model = model
        self._sent = StreamCursor()
        self._reader = None if api_call.tools is None else api_call.tools.reader(api_call.held)
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open = False  # the last item is being written
        self._last: RequestOutput | None = None

    def more(self, place: int, output: RequestOutput) -> Iterator[str]:
        """Yield the beginning, once; then what is new."""
        api_call, sent = self._api_call, self._sent
        (completion,) = output.completions
        self._last = output
        if not sent.begun:
            yield self._event("response.created", response=api_call.response(self._model, "in_progress"))
            yield self._event("response.in_progress", response=api_call.response(self._model, "in_progress"))
            if self._reader is None:
                yield from self._begin(api_call.message())
        delta, logprobs = completion.text[sent.characters :], api_call.logprobs_of(completion, sent.tokens)
        sent.update(completion)
        if self._reader is None:
            if delta or logprobs:
                yield from self._more_text(delta, logprobs)
            return
        for event in [*self._reader.add(delta), *(self._reader.finish() if sent.ended else ())]:
            yield from self._of_event(event)

    def _of_event(self, event: Event) -> Iterator[str]:
        match event:
            case Content(text):
                if not self._open:
                    yield from self._begin(self._api_call.message())
                yield from self._more_text(text, [])
            case CallBegins(name):
                yield from self._close("completed")
                yield from self._begin(self._api_call.call(name))
            case Arguments(text):
                self._items[-1]["arguments"] += text
                yield self._in_item("response.function_call_arguments.delta", delta=text)
            case CallEnds():
                yield from self._close("completed")
            case CallBreaks():
                yield from self._close("incomplete")

    def _begin(self, item: dict[str, Any]) -> Iterator[str]:
        yield self._event("response.output_item.added", output_index=len(self._items), item=dict(item))
        self._items.append(item)
        self._open = True
        if item["type"] == "message":
            item["content"] = [self._api_call.part("")]
            yield self._in_item("response.content_part.added", content_index=0, part=self._api_call.part(""))

    def _more_text(self, delta: str, logprobs: list[dict[str, Any]]) -> Iterator[str]:
        (part,) = self._items[-1]["content"]
        part["text"] += delta
        part["logprobs"] += logprobs
        yield self._in_item("response.output_text.delta", content_index=0, delta=delta, logprobs=logprobs)

    def _close(self, status: str) -> Iterator[str]:
        """Yield the end of the last item, if it is open."""
        if not self._open:
            return
        item = self._items[-1]
        item["status"], self._open = status, False
        if item["type"] == "message":
            (part,) = item["content"]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._in_item("response.output_text.done", content_index=0, **done)
            yield self._in_item("response.content_part.done", content_index=0, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._in_item("response.function_call_arguments.done", **done)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def end(self) -> Iterator[str]:
        """Yield the last item and the response, both whole."""
        assert self._last is not None, "an answer came"
        if not self._items:
            yield from self._begin(self._api_call.message())
        yield from self._close(_status(self._last.completions[0]))
        whole = self._api_call.ended(self._model, self._last, self._items)
        yield self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ApiError) -> Iterator[str]:
        """Yield the failure of the response."""
        details = error.body()["error"] | {"code": _CODES.get(error.status, "server_error")}
        yield self._event(
            "response.failed", response=self._api_call.response(self._model, "failed") | {"error": details}
        )

    def _in_item(self, kind: str, /, **data: Any) -> str:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **data)

    def _event(self, kind: str, /, **data: Any) -> str:
        number, self._number = self._number, self._number + 1
        return event_text({"type": kind, "sequence_number": number} | data, kind)


def _status(completion: Completion) -> str:
    return "completed" if completion.finish_reason == "stop" else "incomplete"


def _usage(output: RequestOutput) -> dict[str, Any]:
    """Return the numbers of a chat in the words of responses."""
    figures = usage([output])
    return {
        "input_tokens": figures["prompt_tokens"],
        "input_tokens_details": figures["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": figures["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": figures["total_tokens"],
        "millpond": figures["millpond"],
    }


class InputPart(Body):
    """A piece of a message; other fields of the server's own answers than the text are ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class InputMessage(Body):
    """One message; other fields of the server's own answers are accepted."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOr[InputPart]
    id: ClientNote | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: ClientNote | None = None

    def as_chat(self) -> Message:
        """Return the same as a message of a chat."""
        content = self.content
        if not isinstance(content, str):
            return Message(role=self.role, content=[ChatPart(type="text", text=part.text) for part in content])
        return Message(role=self.role, content=content)


class FunctionCall(Body):
    """A call of a tool that the model made."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: ClientNote | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, given: str) -> str:
        length_of(arguments_of(given))
        return given

    def as_call(self) -> ToolCall:
        """Return the same as a call of a chat."""
        values = arguments_of(self.arguments)
        return ToolCall(id=self.call_id, function=CalledFunction(name=self.name, arguments=values))


class FunctionOutput(Body):
    """The result of a tool."""

    type: Literal["function_call_output"]
    call_id: Name
    output: TextOr[InputPart]
    id: ClientNote | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def as_chat(self) -> Message:
        """Return the same as a message of a chat."""
        said = self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)
        return Message(role="tool", tool_call_id=self.call_id, content=said)


def _item(value: Any) -> str:
    """Return the tag of an item of the input; "" for messages, which need not have one."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("function_call", "function_call_output") else ""


InputItem = Annotated[
    Annotated[InputMessage, Tag("")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")],
    Discriminator(_item),
]


def _function(given: Any) -> Any:
    """Return a tool, unless it is one that this server would have to run.

    Raises:
        ValueError: it is, by its name.
    """
    kind = given.get("type") if isinstance(given, dict) else "function"
    if kind != "function":
        raise ValueError(f"a tool of type {str(kind)[:80]!r} is not run here; offer functions, which the client runs")
    return given


class FunctionTool(Body):
    """A tool that the client runs."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=NAMES, max_length=MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> Tool:
        """Return the same as a tool of a chat."""
        function = self.model_dump(exclude={"type"})
        return Tool(type="function", function=Function(**function))


class ChosenFunction(Body):
    """The tool that must be called."""

    type: Literal["function"]
    name: Name


class NamedSchema(Body):
    """JSON that follows a schema, always strictly."""

    type: Literal["json_schema"]
    name: ClientNote
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    """The format that the text must follow."""

    format: Annotated[TextFormat | ObjectFormat | NamedSchema, Field(discriminator="type")] | None = None
    verbosity: None = None


class ResponseBody(TokenFields):
    """POST /v1/responses."""

    input: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag(LIST)],
        Discriminator(text_or_list),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextConfig | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: (
        Annotated[
            list[Annotated[FunctionTool, BeforeValidator(_function)]], Field(max_length=MAX_TOOLS, fail_fast=True)
        ]
        | None
    ) = None
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    # the only values that can be obeyed
    background: Literal[False] | None = None
    max_tool_calls: int | None = None  # of tools that a server runs itself, of which there are none
    prompt_cache_retention: ClientNote | None = None
    truncation: Literal["disabled"] | None = None
    # null is what clients send who mean nothing by them; see `UNSUPPORTED`
    conversation: None = None
    previous_response_id: None = None
    prompt: None = None
    reasoning: None = None
