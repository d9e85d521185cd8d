"""Common parts of all descriptions, and errors."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Described(BaseModel):
    """What is sent has these fields and no others; only those with a default may be missing."""

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
    """Every error, whatever its status."""

    error: ErrorDetails


class KeptFigures(Described):
    """What caches held: bytes of pages, of slots in them without an entry, of a full cache, and of the states of a
    hybrid; entries that left; tokens of the prompt that came from the chunk store, those that `forget` took, and
    whether all are exact."""

    kv_bytes: int
    unused_bytes: int
    full_kv_bytes: int
    state_bytes: int
    evicted: int
    restored_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    forgotten_tokens: int
    exact: bool
    seen: int
    held: float


class AnswerFigures(KeptFigures):
    """The same of a whole answer, and seconds since it arrived; null: it never came so far."""

    queue_s: float | None
    first_token_s: float | None
    total_s: float | None


class ChoiceFigures(Described):
    """The true reason of one answer's end, and what its cache held."""

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
    exact: bool | None = None
    seen: int | None = None
    held: float | None = None


class TokenScore(Described):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenScores(TokenScore):
    """A token of an answer, and the likeliest in its place."""

    top_logprobs: list[TokenScore]
