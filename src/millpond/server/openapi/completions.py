"""Answers of /v1/completions and /v1/chat/completions, and the chunks of their streams."""

from __future__ import annotations

from typing import Literal

from millpond.server.openapi.base import AnswerFigures, ChoiceFigures, Described, TokenScores

Reason = Literal["stop", "length", "tool_calls"]


class CachedTokens(Described):
    """Tokens of the prompt that others had read."""

    cached_tokens: int


class Usage(Described):
    """The numbers of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    millpond: AnswerFigures


class Scores(Described):
    """Log probabilities in parallel lists; null where a token has nothing before it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Described):
    """One text; in a stream what is new of it, with the reason in its last piece."""

    index: int
    text: str
    logprobs: Scores | None
    finish_reason: Reason | None
    token_ids: list[int] | None = None
    millpond: ChoiceFigures | None = None


class Completion(Described):
    """Whole texts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class PromptProgress(Described):
    """How far a prompt is read: tokens, those among them that were not computed for it, and milliseconds."""

    index: int
    total: int
    cache: int
    processed: int
    time_ms: int


class CompletionChunk(Described):
    """A piece of one text; the last chunk has numbers and no choice, the first ones progress, where requested."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    prompt_progress: PromptProgress | None = None


class ChatScores(Described):
    """Log probabilities, one object per token."""

    content: list[TokenScores]
    refusal: None


class SentFunction(Described):
    """What is called, and the JSON of what it is called with."""

    name: str
    arguments: str


class SentCall(Described):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: SentFunction


class ChatAnswer(Described):
    """The message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[SentCall] | None = None


class ChatChoice(Described):
    """One message."""

    index: int
    message: ChatAnswer
    logprobs: ChatScores | None
    finish_reason: Reason
    millpond: ChoiceFigures


class Chat(Described):
    """Whole messages."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Described):
    """More of a call."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(Described):
    """More of the call of this number."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Described):
    """What is new in a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(Described):
    """What is new in one message, or the reason of its end."""

    index: int
    delta: ChatDelta
    logprobs: ChatScores | None
    finish_reason: Reason | None
    millpond: ChoiceFigures | None = None


class ChatChunk(Described):
    """A piece of one message; the last chunk has numbers and no choice, the first ones progress, where requested."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_progress: PromptProgress | None = None
