"""Constraints on answers in vLLM's words: `guided_*` and `structured_outputs`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from millpond.engine.grammar.compiler import MAX_CHOICES, MAX_GRAMMAR
from millpond.engine.grammar.patterns import MAX_CHARACTERS
from millpond.engine.grammar.schema import MAX_BYTES
from millpond.server.errors import ApiError, of_validation
from millpond.server.messages import Body

#: Structures of one structural tag at most.
MAX_STRUCTURES = 128
_FEW = Field(min_length=1, max_length=MAX_STRUCTURES, fail_fast=True)
#: A JSON schema as itself or as its text.
Schema = dict[str, Any] | bool | Annotated[str, Field(max_length=MAX_BYTES)]
Regex = Annotated[str, Field(max_length=MAX_CHARACTERS)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
Ebnf = Annotated[str, Field(max_length=MAX_GRAMMAR)]
Tag = dict[str, Any] | Annotated[str, Field(max_length=MAX_BYTES)]


class Structure(Body):
    """A part of an answer between two marks that must be JSON of a schema."""

    begin: str
    schema_: dict[str, Any] | bool = Field(alias="schema")
    end: str


class StructuralTag(Body):
    """A structural tag: a format of xgrammar's, or structures after triggers, in the older words of vLLM."""

    type: Literal["structural_tag"] = "structural_tag"
    format: dict[str, Any] | None = None
    structures: Annotated[list[Structure], _FEW] | None = None
    triggers: Annotated[list[str], _FEW] | None = None

    def constraint(self, field: str) -> dict[str, Any]:
        """Return the format that an answer must follow.

        Raises:
            ApiError: neither a format nor structures with triggers, or both.
        """
        if self.format is not None and self.structures is None and self.triggers is None:
            return self.format
        if self.format is not None or self.structures is None or self.triggers is None:
            message = f"{field}: a structural_tag has either a format, or structures and triggers"
            raise ApiError(400, message, "invalid_value", field)
        tags = [
            {
                "type": "tag",
                "begin": one.begin,
                "end": one.end,
                "content": {"type": "json_schema", "json_schema": one.schema_},
            }
            for one in self.structures
        ]
        return {"type": "triggered_tags", "triggers": self.triggers, "tags": tags}


class StructuredOutputs(Body):
    """`structured_outputs`: one of these."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Ebnf | None = None
    structural_tag: Tag | None = None


class GuidedFields(Body):
    """Rules for the whole answer: one of these at most."""

    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Ebnf | None = None
    structured_outputs: StructuredOutputs | None = None


def constraint(fields: GuidedFields) -> tuple[str, dict[str, Any]] | None:
    """Return the field that says what an answer must follow, with its `SamplingParams`.

    Raises:
        ApiError: 400, more than one, none inside `structured_outputs`, or no JSON.
    """
    constraints = [
        (name, _words(name.removeprefix("guided_"), value, name))
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        if (value := getattr(fields, name)) is not None
    ]
    if fields.structured_outputs is not None:
        inside = fields.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        nested = [
            (f"structured_outputs.{name}", _words(name, value, f"structured_outputs.{name}"))
            for name, value in inside.items()
            if value is not False
        ]
        if not nested:
            message = "structured_outputs must hold one of json, json_object, regex, choice, grammar, structural_tag"
            raise ApiError(400, message, "invalid_value", "structured_outputs")
        constraints += nested
    if len(constraints) > 1:
        raise two_of(constraints[0][0], constraints[1][0])
    return constraints[0] if constraints else None


def two_of(one: str, other: str) -> ApiError:
    """Return an error about two fields that both say what the answer must follow."""
    message = f"{one} and {other}: an answer can follow one of them; leave the other out"
    return ApiError(400, message, "invalid_value", one)


def _words(name: str, value: Any, field: str) -> dict[str, Any]:
    if name == "json":
        return {"json_schema": _value(value, field)}
    if name == "json_object":
        return {"json_schema": {"type": "object"}}
    if name == "structural_tag":
        tag = _value(value, field)
        return {name: _tag(tag, field) if isinstance(tag, dict) else tag}
    return {name: tuple(value) if name == "choice" else value}


def _tag(tag: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the format of a tag that is given alone, or inside of a whole structural tag."""
    if tag.get("type") != "structural_tag" and "structures" not in tag:
        return tag
    try:
        return StructuralTag.model_validate(tag).constraint(field)
    except ValidationError as error:
        raise of_validation([{**one, "loc": (field, *one["loc"])} for one in error.errors(include_url=False)]) from None


def _value(given: Any, field: str) -> Any:
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{field} is no JSON: {error}", "invalid_value", field) from None
    if not isinstance(value, dict | bool):
        raise ApiError(400, f"{field} must be a JSON object, not {type(value).__name__}", "invalid_value", field)
    return value
