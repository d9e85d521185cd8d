"""The page of the fields of requests: a table for each kind of body, from the schemas that check it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from generated.markup import NOTE, cell, left
from millpond.server.schemas import CacheFields, ChatBody, CompletionBody, InfillBody, SamplingFields, TokenFields
from millpond_lab.bench.common.report import markdown_table

INTRO = """\
Every field that the server takes, with its type and bounds; an unknown one is refused by name.
What those do that OpenAI lacks is said in [the server](../how-to/serve.md).
`GET /openapi.json` has the same schemas for programs.
Where no default is shown it is null, which leaves the choice to the server.
"""
#: Titles, the body, and that whose fields the table leaves out, because they are in another.
TABLES: tuple[tuple[str, type[BaseModel], type[BaseModel] | None, str], ...] = (
    ("Every answer", TokenFields, None, "Completions, chats and `/infill`; `/v1/responses` and `/v1/messages` too."),
    ("Completions and chats", SamplingFields, TokenFields, ""),
    ("Completions", CompletionBody, SamplingFields, "`POST /v1/completions`."),
    ("Chats", ChatBody, SamplingFields, "`POST /v1/chat/completions`."),
    ("Infill", InfillBody, TokenFields, "`POST /infill`."),
    (
        "`millpond`",
        CacheFields,
        None,
        "How the cache of this request is kept ([what each does](../how-to/serve.md#a-cache-per-request)).",
    ),
)
#: What JSON's schemas call the bounds of a value.
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} keys",
}


def request_fields_page() -> str:
    """The page in Markdown."""
    parts = [f"{NOTE}# Fields of requests\n\n{INTRO}"]
    for title, body, without, about in TABLES:
        table = markdown_table(("field", "type", "default"), _rows(body, without))
        parts.append("\n\n".join(filter(None, (f"## {title}", about, left(table)))))
    return "\n".join(parts)


def _rows(body: type[BaseModel], without: type[BaseModel] | None) -> Iterator[tuple[str, ...]]:
    schema = body.model_json_schema()
    known = without.model_fields.keys() if without else ()
    for name, field in schema["properties"].items():
        if name not in known and field.get("type") != "null":  # what may only be null is not supported
            needed = name in schema.get("required", ())
            default = "required" if needed else _default(field.get("default"))
            yield f"`{name}`", cell(_type(field)), default


def _default(value: Any) -> str:
    return "" if value is None or isinstance(value, dict) else f"`{json.dumps(value)}`"


def _type(field: Mapping[str, Any]) -> str:
    """The type of a field in words, with its bounds."""
    if "$ref" in field:
        return f"`{field['$ref'].rpartition('/')[2]}`"
    for several in ("anyOf", "oneOf"):
        if several in field:
            kinds = [_type(one) for one in field[several] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "const" in field or "enum" in field:
        return " or ".join(f"`{json.dumps(value)}`" for value in field.get("enum", (field.get("const"),)))
    kind = str(field.get("type", "any value"))
    if kind == "array" and "prefixItems" in field:
        return f"array of {len(field['prefixItems'])}: {', '.join(dict.fromkeys(map(_type, field['prefixItems'])))}"
    if kind == "array":
        items = f" of {_type(field['items'])}" if field.get("items") else ""
        return f"{kind}{_bounds(field)}{items}"
    return f"{kind}{_bounds(field)}"


def _bounds(field: Mapping[str, Any]) -> str:
    bounds = [text.format(_number(field[name])) for name, text in BOUNDS.items() if name in field]
    return f" ({', '.join(bounds)})" if bounds else ""


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else str(value)
