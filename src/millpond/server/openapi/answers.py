"""Answers of completions, chats and responses, the chunks and events of their streams, and errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from millpond.server.responses import ChosenFunction, FunctionTool, NamedSchema
from millpond.server.schemas import ObjectFormat, TextFormat


class Described(BaseModel):
    """Base of what is sent, with these fields and no others; only defaults may be missing."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetails(Described):
    """What went wrong.

    Attributes:
        message: for a person. code: for a program. param: the field that it is about.
    """

    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class ErrorAnswer(Described):
    """An error, with any status."""

    error: ErrorDetails


class KeptFigures(Described):
    """Bytes, entries and tokens of caches.

    They are bytes of pages, of slots in them without an entry, of a full cache, and of the states of a hybrid; entries
    that left; tokens of the prompt that came from the chunk store, those that `forget` took, and whether all are exact.
    """

    kv_bytes: int
    unused_bytes: int
    full_kv_bytes: int
    state_bytes: int
    evicted: int
    restored_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    forgotten_tokens: int
    decoded_tokens: int
    exact: bool
    seen: int
    held: float


class AnswerFigures(KeptFigures):
    """Figures of a whole answer, and seconds since it arrived; null if it never got to that point."""

    queue_s: float | None
    first_token_s: float | None
    total_s: float | None


class ChoiceFigures(Described):
    """The true reason why one answer ended, and what its cache held."""

    finish_reason: Literal["stop", "length", "cancelled", "deadline", "error"]
    stop_reason: str | int | None
    kv_bytes: int | None = None
    unused_bytes: int | None = None
    full_kv_bytes: int | None = None
    state_bytes: int | None = None
    evicted: int | None = None
    restored_tokens: int | None = None
    reused_tokens: int | None = None
    recomputed_tokens: int | None = None
    forgotten_tokens: int | None = None
    decoded_tokens: int | None = None
    exact: bool | None = None
    seen: int | None = None
    held: float | None = None


class TokenScore(Described):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenScores(TokenScore):
    """A token of an answer, and the likeliest tokens in its place."""

    top_logprobs: list[TokenScore]


Reason = Literal["stop", "length", "tool_calls"]


class CachedTokens(Described):
    """Tokens of the prompt that came from the cache of earlier requests."""

    cached_tokens: int


class Usage(Described):
    """Token counts of an answer, and figures of its cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    millpond: AnswerFigures


class Scores(Described):
    """Log probabilities in parallel lists; null for a token with nothing before it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Described):
    """One text; in a stream its next piece, and in its last piece the reason why it ended."""

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
    """How far a prompt is read: its tokens, how many of them came from a cache, and milliseconds."""

    index: int
    total: int
    cache: int
    processed: int
    time_ms: int


class CompletionChunk(Described):
    """A piece of one text; the last chunk has usage and no choice, the first ones progress, if requested."""

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
    """The function that is called, and the JSON of its arguments."""

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
    """The next piece of a call."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(Described):
    """The next piece of the call with this number."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Described):
    """The next piece of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(Described):
    """The next piece of one message, or the reason why it ended."""

    index: int
    delta: ChatDelta
    logprobs: ChatScores | None
    finish_reason: Reason | None
    millpond: ChoiceFigures | None = None


class ChatChunk(Described):
    """A piece of one message; the last chunk has usage and no choice, the first ones progress, if requested."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_progress: PromptProgress | None = None


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
    """Tokens of the prompt that came from the cache of earlier requests."""

    cache_write_tokens: Literal[0]


class OutputTokens(Described):
    """Details of the tokens of an answer; none are hidden."""

    reasoning_tokens: Literal[0]


class ResponseUsage(Described):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int
    millpond: AnswerFigures


class FailedResponse(Described):
    """Why a response failed in its stream; `code` is one of OpenAI's codes."""

    message: str
    type: str
    param: str | None
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class IncompleteDetails(Described):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class TextFormatOf(Described):
    """The format that the text had to follow."""

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
    """The response so far."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseAnswer


class OfItem(Numbered):
    """A message or a call begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class InPart(Numbered):
    """Event about the text of the message."""

    item_id: str
    output_index: int
    content_index: Literal[0]


class OfPart(InPart):
    """A text begins, or is complete."""

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
    """The next piece of the JSON of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Numbered):
    """The complete JSON of a call's arguments."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


#: Every event of a stream.
EVENTS: tuple[type[Described], ...] = (OfResponse, OfItem, OfPart, TextDelta, TextDone, ArgumentsDelta, ArgumentsDone)
