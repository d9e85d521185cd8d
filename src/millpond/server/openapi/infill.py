"""Answers of /infill, and the events of its streams."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from millpond.server.openapi.answers import ChoiceFigures, Described


class InfillTimings(Described):
    """Tokens, milliseconds and speed of the prompt that was read, and of the answer."""

    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Infilled(Described):
    """A text in the middle, or the end of its stream; with `response_fields` these alone, each under its path."""

    model_config = ConfigDict(
        json_schema_extra={"required": [], "additionalProperties": True}  # which fields come is the client's choice
    )

    index: Literal[0]
    content: str
    id_slot: Literal[-1]
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: Literal[False]
    has_new_line: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    timings: InfillTimings
    millpond: ChoiceFigures


class InfillChunk(Described):
    """More of the text."""

    model_config = ConfigDict(json_schema_extra={"required": [], "additionalProperties": True})

    index: Literal[0]
    content: str
    id_slot: Literal[-1]
    stop: Literal[False] = Field(description="More comes.")
