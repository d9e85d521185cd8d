"""Satisfiability of schemas: whether a schema has a value, and whether two schemas may share one.

Both read the forms of `millpond.engine.grammar.schema_types`, with references as `#/$defs/NAME`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from millpond.engine.grammar.schema_types import GUESSED, Schema

#: References one after another that are followed when two schemas are compared.
_MOST_HOPS = 8
#: How deep two schemas are compared, and how many choices of one.
_MOST_DEPTH, MOST_PARTS = 4, 50


def satisfiable(root: Schema, definitions: Mapping[str, Schema]) -> bool:
    """Whether some finite value follows `root`: a schema that needs itself inside itself has none.

    Ranges and expressions without a value are not seen here.
    """
    known: set[str] = set()
    while True:
        new = {name for name, node in definitions.items() if name not in known and _has_value(node, known)}
        if not new:
            return _has_value(root, known)
        known |= new


def _has_value(node: Schema, known: set[str]) -> bool:
    """Whether a value is found with those definitions that are known to have one."""
    if isinstance(node, bool):
        return node
    if "$ref" in node:
        return name_of(node) in known
    if "anyOf" in node or "oneOf" in node:
        return any(_has_value(one, known) for one in node.get("anyOf", ()) or node["oneOf"])
    if node.get("type") == "object":
        declared = node.get("properties", {})
        return all(_has_value(declared[name], known) for name in node.get("required", ()))
    if node.get("type") == "array":
        least, first = node.get("minItems", 0), node.get("prefixItems", [])
        wanted = list(first[:least])
        if least > len(first):
            wanted.append(node["items"])
        return all(_has_value(one, known) for one in wanted)
    return True


def disjoint(first: Schema, second: Schema, definitions: Mapping[str, Schema], depth: int = 0) -> bool:
    """Whether it is certain that no value follows both: by their types, their values, or a property of both."""
    first, second = _followed(first, definitions), _followed(second, definitions)
    if depth > _MOST_DEPTH:
        return False
    for one, other in ((first, second), (second, first)):
        if isinstance(one, dict) and ("anyOf" in one or "oneOf" in one):
            parts = one.get("anyOf") or one["oneOf"]
            return len(parts) <= MOST_PARTS and all(disjoint(part, other, definitions, depth + 1) for part in parts)
    if not isinstance(first, dict) or not isinstance(second, dict) or "$ref" in first or "$ref" in second:
        return False
    if GUESSED in first or GUESSED in second:
        return False
    if not _kinds(first) & _kinds(second):
        return True
    if "enum" in first and "enum" in second:
        return not {_key(value) for value in first["enum"]} & {_key(value) for value in second["enum"]}
    shared = set(first.get("required", ())) & set(second.get("required", ()))
    return any(
        disjoint(first["properties"][name], second["properties"][name], definitions, depth + 1) for name in shared
    )


def name_of(reference: dict[str, Any]) -> str:
    """The name in a `$ref`."""
    return str(reference["$ref"]).removeprefix("#/$defs/")


def _followed(node: Schema, definitions: Mapping[str, Schema]) -> Schema:
    for _ in range(_MOST_HOPS):
        if isinstance(node, bool) or "$ref" not in node:
            break
        node = definitions[name_of(node)]
    return node


def _kinds(node: dict[str, Any]) -> set[str]:
    """The types that values may have; a whole number is a number."""
    if "enum" not in node:
        return {"number" if node["type"] == "integer" else node["type"]}
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null") for value in node["enum"]}


def _key(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """A JSON value with 1.0 as 1, which are the same."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value == int(value) else value
