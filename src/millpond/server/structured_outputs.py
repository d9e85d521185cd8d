"""Constraints on answers in vLLM's words: `guided_*` and `structured_outputs`."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from millpond.engine.grammar.compiler import MOST_CHOICES, MOST_GRAMMAR
from millpond.engine.grammar.patterns import MOST_CHARACTERS
from millpond.engine.grammar.schema import MOST_BYTES
from millpond.server.errors import ApiError
from millpond.server.messages import Body

#: A JSON schema as itself or as its text.
Schema = dict[str, Any] | bool | Annotated[str, Field(max_length=MOST_BYTES)]
Regex = Annotated[str, Field(max_length=MOST_CHARACTERS)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]
Ebnf = Annotated[str, Field(max_length=MOST_GRAMMAR)]
Tag = dict[str, Any] | Annotated[str, Field(max_length=MOST_BYTES)]


class StructuredOutputs(Body):
    """`structured_outputs`: one of these."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Ebnf | None = None
    structural_tag: Tag | None = None


class GuidedFields(Body):
    """What the whole answer must follow: one of these at most."""

    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Ebnf | None = None
    structured_outputs: StructuredOutputs | None = None


def constraint(fields: GuidedFields) -> tuple[str, dict[str, Any]] | None:
    """The field of a request that says what its answer must follow, and what that is in words of `SamplingParams`.

    Raises:
        ApiError: 400, more than one, none inside `structured_outputs`, or no JSON.
    """
    found = [
        (name, _words(name.removeprefix("guided_"), value, name))
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        if (value := getattr(fields, name)) is not None
    ]
    if fields.structured_outputs is not None:
        inside = fields.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        given = [
            (f"structured_outputs.{name}", _words(name, value, f"structured_outputs.{name}"))
            for name, value in inside.items()
            if value is not False
        ]
        if not given:
            message = "structured_outputs must hold one of json, json_object, regex, choice, grammar, structural_tag"
            raise ApiError(400, message, "invalid_value", "structured_outputs")
        found += given
    if len(found) > 1:
        raise two_of(found[0][0], found[1][0])
    return found[0] if found else None


def two_of(one: str, other: str) -> ApiError:
    """Of two fields that both say what the answer must follow."""
    message = f"{one} and {other}: an answer can follow one of them; leave the other out"
    return ApiError(400, message, "invalid_value", one)


def _words(name: str, value: Any, field: str) -> dict[str, Any]:
    if name == "json":
        return {"json_schema": _value(value, field)}
    if name == "json_object":
        return {"json_schema": {"type": "object"}}
    if name == "structural_tag":
        return {name: _value(value, field)}
    return {name: tuple(value) if name == "choice" else value}


def _value(given: Any, field: str) -> Any:
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{field} is no JSON: {error}", "invalid_value", field) from None
    if not isinstance(found, dict | bool):
        raise ApiError(400, f"{field} must be a JSON object, not {type(found).__name__}", "invalid_value", field)
    return found
