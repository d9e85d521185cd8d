"""Answers of /v1/messages and /v1/messages/count_tokens, the events of their streams, and their errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from millpond.server.openapi.answers import AnswerFigures, ChoiceFigures, Described

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnthropicErrorDetails(Described):
    """The error: its type for a program, and a message for a person."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "timeout_error",
        "api_error",
        "overloaded_error",
    ]
    message: str


class AnthropicErrorAnswer(Described):
    """An error of these routes, with any status; also the last event of a stream that fails."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


class SentText(Described):
    """A text; empty at the beginning of a stream."""

    type: Literal["text"]
    text: str


class SentToolUse(Described):
    """A call of a tool; at the beginning of a stream without its input."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Described):
    """Token counts of a message; tokens of the prompt that came from the cache do not count as input."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    millpond: AnswerFigures


class SentMessage(Described):
    """The message; at the beginning of a stream without content and reason."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[SentText | SentToolUse, Field(discriminator="type")]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    millpond: ChoiceFigures | None = None


class MessageStart(Described):
    """A message begins."""

    type: Literal["message_start"]
    message: SentMessage


class Ping(Described):
    """The connection is alive."""

    type: Literal["ping"]


class BlockStart(Described):
    """A block of the message begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: Annotated[SentText | SentToolUse, Field(discriminator="type")]


class NewText(Described):
    """The next piece of a text."""

    type: Literal["text_delta"]
    text: str


class NewInput(Described):
    """The next piece of the JSON of a call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Described):
    """The next piece of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[NewText | NewInput, Field(discriminator="type")]


class BlockStop(Described):
    """A block is complete."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Described):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Described):
    """The end of a message, and its usage."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage
    millpond: ChoiceFigures


class MessageStop(Described):
    """The stream ends."""

    type: Literal["message_stop"]


class CountedTokens(Described):
    """Number of tokens that the model would read."""

    input_tokens: int


#: Every event of a stream.
EVENTS: tuple[type[Described], ...] = (
    MessageStart,
    Ping,
    BlockStart,
    BlockDelta,
    BlockStop,
    MessageDelta,
    MessageStop,
    AnthropicErrorAnswer,
)
