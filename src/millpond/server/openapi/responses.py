"""Answers of /v1/responses, and the events of its streams."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from millpond.server.openapi.base import AnswerFigures, ChoiceFigures, Described, TokenScores
from millpond.server.openapi.completions import CachedTokens
from millpond.server.responses_schemas import ChosenFunction, FunctionTool, NamedSchema
from millpond.server.schemas import ObjectFormat, TextFormat

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Described):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[None], Field(max_length=0)]
    logprobs: list[TokenScores]


class OutputMessage(Described):
    """The message."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: Annotated[list[OutputText], Field(max_length=1)]


class OutputCall(Described):
    """A call of a tool."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[OutputMessage | OutputCall, Field(discriminator="type")]


class InputTokens(CachedTokens):
    """Tokens of the prompt that others had read."""

    cache_write_tokens: Literal[0]


class OutputTokens(Described):
    """No tokens are hidden."""

    reasoning_tokens: Literal[0]


class ResponseUsage(Described):
    """The numbers of a response."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int
    millpond: AnswerFigures


class FailedResponse(Described):
    """Why a response failed in its stream; code is one of OpenAI's few."""

    message: str
    type: str
    param: str | None
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class IncompleteDetails(Described):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class TextFormatOf(Described):
    """What the text had to follow."""

    format: Annotated[TextFormat | ObjectFormat | NamedSchema, Field(discriminator="type")]


class ResponseAnswer(Described):
    """A response, with fields of its request; nothing of it is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None = None
    status: Status
    error: FailedResponse | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: TextFormatOf
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    millpond: ChoiceFigures | None = None


class Numbered(Described):
    """An event, by its place in the stream."""

    sequence_number: int


class OfResponse(Numbered):
    """The response as far as it has come."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseAnswer


class OfItem(Numbered):
    """A message or a call begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class InPart(Numbered):
    """What is about the text of the message."""

    item_id: str
    output_index: int
    content_index: Literal[0]


class OfPart(InPart):
    """The text begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText


class TextDelta(InPart):
    """New text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[TokenScores]


class TextDone(InPart):
    """The whole text."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[TokenScores]


class ArgumentsDelta(Numbered):
    """More of the JSON of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Numbered):
    """All of it."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


#: Every event of a stream.
EVENTS: tuple[type[Described], ...] = (OfResponse, OfItem, OfPart, TextDelta, TextDone, ArgumentsDelta, ArgumentsDone)
