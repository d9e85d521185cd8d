"""JSON schemas from clients: bounded, satisfiable, every keyword enforced or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from millpond.engine.grammar.schema_types import ANNOTATIONS, DEFINITIONS, GUESSED, Forms, Schema, bad, shown
from millpond.errors import OptionError

#: Most references in a row that are followed when two schemas are compared.
_MAX_HOPS = 8
#: Greatest depth at which two schemas are compared, and most choices of one.
_MAX_COMPARE_DEPTH, MAX_PARTS = 4, 50


def satisfiable(root: Schema, definitions: Mapping[str, Schema]) -> bool:
    """Return whether some finite value follows `root`.

    A schema that needs itself inside itself has none. Ranges and expressions without a value are not detected.
    """
    satisfiable_names: set[str] = set()
    while True:
        new_names = {
            name
            for name, node in definitions.items()
            if name not in satisfiable_names and _has_value(node, satisfiable_names)
        }
        if not new_names:
            return _has_value(root, satisfiable_names)
        satisfiable_names |= new_names


def _has_value(node: Schema, satisfiable_names: set[str]) -> bool:
    """Return whether a value exists, given the definitions that are known to have one."""
    if isinstance(node, bool):
        return node
    if "$ref" in node:
        return name_of(node) in satisfiable_names
    if "anyOf" in node or "oneOf" in node:
        return any(_has_value(part, satisfiable_names) for part in node.get("anyOf", ()) or node["oneOf"])
    if node.get("type") == "object":
        declared = node.get("properties", {})
        return all(_has_value(declared[name], satisfiable_names) for name in node.get("required", ()))
    if node.get("type") == "array":
        min_items, prefix_items = node.get("minItems", 0), node.get("prefixItems", [])
        needed_items = list(prefix_items[:min_items])
        if min_items > len(prefix_items):
            needed_items.append(node["items"])
        return all(_has_value(part, satisfiable_names) for part in needed_items)
    return True


def disjoint(first: Schema, second: Schema, definitions: Mapping[str, Schema], depth: int = 0) -> bool:
    """Return whether it is certain that no value follows both schemas.

    Their types, their values, or a property of both may show it.
    """
    first, second = _followed(first, definitions), _followed(second, definitions)
    if depth > _MAX_COMPARE_DEPTH:
        return False
    for choice, other in ((first, second), (second, first)):
        if isinstance(choice, dict) and ("anyOf" in choice or "oneOf" in choice):
            parts = choice.get("anyOf") or choice["oneOf"]
            return len(parts) <= MAX_PARTS and all(disjoint(part, other, definitions, depth + 1) for part in parts)
    if not isinstance(first, dict) or not isinstance(second, dict) or "$ref" in first or "$ref" in second:
        return False
    if GUESSED in first or GUESSED in second:
        return False
    if not _kinds(first) & _kinds(second):
        return True
    if "enum" in first and "enum" in second:
        return not {_key(value) for value in first["enum"]} & {_key(value) for value in second["enum"]}
    shared_names = set(first.get("required", ())) & set(second.get("required", ()))
    return any(
        disjoint(first["properties"][name], second["properties"][name], definitions, depth + 1) for name in shared_names
    )


def name_of(reference: dict[str, Any]) -> str:
    """Return the name in a `$ref`."""
    return str(reference["$ref"]).removeprefix("#/$defs/")


def _followed(node: Schema, definitions: Mapping[str, Schema]) -> Schema:
    for _ in range(_MAX_HOPS):
        if isinstance(node, bool) or "$ref" not in node:
            break
        node = definitions[name_of(node)]
    return node


def _kinds(node: dict[str, Any]) -> set[str]:
    """Return the types that values may have; a whole number is a number."""
    if "enum" not in node:
        return {"number" if node["type"] == "integer" else node["type"]}
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null") for value in node["enum"]}


def _key(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return a JSON value with 1.0 as 1, which are the same."""
    if isinstance(value, dict):
        return {name: _plain(element) for name, element in value.items()}
    if isinstance(value, list):
        return [_plain(element) for element in value]
    return int(value) if isinstance(value, float) and value == int(value) else value


#: Limits of one schema: bytes of JSON, schemas inside it, schemas inside each other, values of all `enum` together,
#: and targets of `$ref`.
MAX_BYTES, MAX_SCHEMAS, MAX_DEPTH, MAX_VALUES, MAX_REFS = 128 * 1024, 2_000, 32, 1_000, 200


def enforceable(schema: Any) -> Schema:
    """Return a schema that xgrammar enforces exactly, and whose values all follow `schema`.

    Raises:
        OptionError: it is too large, no JSON schema, holds what cannot be enforced, or no value can follow it.

    Example:
        >>> enforceable({"title": "age", "minimum": 1})
        {'type': 'number', 'minimum': 1}
    """
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"json_schema is not JSON: {error}") from None
    if size > MAX_BYTES:
        raise OptionError(f"json_schema has {size:,} bytes and may have {MAX_BYTES:,}")
    walk = _Walk()
    root = walk.schema(schema, "#", 0)
    names = walk.names()
    definitions = {name: _linked(walk.forms[pointer], names) for pointer, name in names.items()}
    root = {"$ref": f"#/$defs/{names['#']}"} if "#" in names else _linked(root, names)
    if not satisfiable(root, definitions):
        raise OptionError("json_schema can be followed by no value")
    _check_choices(root, definitions)
    for node in definitions.values():
        _check_choices(node, definitions)
    root = _finished(root)
    if not definitions or isinstance(root, bool):
        return root
    return {"$defs": {name: _finished(node) for name, node in definitions.items()}} | root


class _Walk(Forms):
    """Walk through the schemas in a schema, and nothing else: property names are no keywords.

    Attributes:
        forms: Pointer -> schema in a form that is enforced, its references still by pointer.
    """

    def __init__(self) -> None:
        self.forms: dict[str, Schema] = {}
        self._refs: dict[str, str] = {}  # target of a reference -> location of the reference
        self._values = 0

    def names(self) -> dict[str, str]:
        """Return every target of a reference, with a name of its own.

        Raises:
            OptionError: there is no schema at such a target, or there are too many of them.
        """
        for pointer, location in self._refs.items():
            if pointer not in self.forms:
                raise bad(location, "$ref", f"there is no schema at {pointer!r} inside this one")
        if len(self._refs) > MAX_REFS:
            raise OptionError(f"json_schema points to {len(self._refs):,} places and may to {MAX_REFS:,}")
        return {pointer: f"r{number}" for number, pointer in enumerate(self._refs)}

    def schema(self, raw_schema: Any, location: str, depth: int) -> Schema:
        """Return the schema at a location in a form that is enforced."""
        if len(self.forms) >= MAX_SCHEMAS:
            raise OptionError(f"json_schema holds more than {MAX_SCHEMAS:,} schemas")
        if depth > MAX_DEPTH:
            raise OptionError(f"json_schema has schemas inside each other more than {MAX_DEPTH} deep, at {location}")
        if not isinstance(raw_schema, Mapping | bool):
            raise bad(location, "", f"a schema is an object or a boolean, not {shown(raw_schema)}")
        self.forms[location] = True  # it counts from now on
        form = raw_schema if isinstance(raw_schema, bool) else self._written(dict(raw_schema), location, depth)
        self.forms[location] = form
        return form

    def _written(self, raw_schema: dict[str, Any], location: str, depth: int) -> Schema:
        for definitions in DEFINITIONS & raw_schema.keys():
            self.schemas(raw_schema.pop(definitions), f"{location}/{definitions}", depth)
        keywords = {
            name: value for name, value in raw_schema.items() if name not in ANNOTATIONS and not name.startswith("x-")
        }
        if "$ref" in keywords:
            return self._reference(keywords, location)
        if "const" in keywords or "enum" in keywords:
            return self._among(keywords, location)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in keywords:
                return self._several(name, keywords, location, depth)
        return self.typed(keywords, location, depth)

    def _reference(self, keywords: dict[str, Any], location: str) -> Schema:
        alone(keywords, "$ref", location)
        pointer = keywords["$ref"]
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise bad(
                location, "$ref", f"{shown(pointer)} is outside this schema; only '#' and '#/...' can be followed"
            )
        self._refs.setdefault(pointer, location)
        return {"$ref": pointer}

    def _among(self, keywords: dict[str, Any], location: str) -> Schema:
        types = keywords.pop("type", None)
        name = "const" if "const" in keywords else "enum"
        alone(keywords, name, location)
        values = [keywords[name]] if name == "const" else keywords[name]
        if not isinstance(values, list) or not values:
            raise bad(location, name, "a list of at least one value is needed")
        self._values += len(values)
        if self._values > MAX_VALUES:
            raise OptionError(f"json_schema lists more than {MAX_VALUES:,} values in enum, at {location}")
        if types is not None:
            allowed_types = self.types(types, location)
            mistyped = [value for value in values if not any(is_of(value, kind) for kind in allowed_types)]
            if mistyped:
                raise bad(location, name, f"{shown(mistyped[0])} is not of the schema's type")
        return {"enum": values}

    def _several(self, name: str, keywords: dict[str, Any], location: str, depth: int) -> Schema:
        alone(keywords, name, location)
        raw_schemas = keywords[name]
        if not isinstance(raw_schemas, list) or not raw_schemas:
            raise bad(location, name, "a list of at least one schema is needed")
        if name == "allOf" and len(raw_schemas) > 1:
            raise bad(location, name, "more than one schema at a time cannot be enforced; write them as one")
        forms = [
            self.schema(raw_schema, f"{location}/{name}/{index}", depth + 1)
            for index, raw_schema in enumerate(raw_schemas)
        ]
        return forms[0] if len(forms) == 1 else {name: forms}


def alone(keywords: Mapping[str, Any], name: str, location: str) -> None:
    """Check that no other keyword comes with `name`, which would hide it.

    Raises:
        OptionError: there is another one.
    """
    others = sorted(keywords.keys() - {name})
    if others:
        raise bad(location, others[0], f"together with {name} it cannot be enforced")


def is_of(value: Any, kind: str) -> bool:
    """Return whether a JSON value is of a type of JSON schemas."""
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == {str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]


def _check_choices(node: Schema, definitions: Mapping[str, Schema]) -> None:
    """Check that the schemas of each `oneOf` share no value: only one of them may hold.

    Raises:
        OptionError: they may share one.
    """
    for part in _inside(node):
        choices = part.get("oneOf", ())
        if len(choices) > MAX_PARTS:
            raise OptionError(f"json_schema: oneOf of {len(choices)} schemas; at most {MAX_PARTS} can be enforced")
        for index, first in enumerate(choices):
            if not all(disjoint(first, other, definitions) for other in choices[index + 1 :]):
                raise OptionError(
                    "json_schema: oneOf cannot be enforced where two of its schemas may hold for one value; use anyOf, "
                    "or give each a required property with a const of its own"
                )


def _finished(node: Schema) -> Schema:
    """Return a form with disjoint choices as plain ones, and without marks."""
    return _mapped(
        node,
        lambda part: (
            {"anyOf": part["oneOf"]}
            if "oneOf" in part
            else {name: inner for name, inner in part.items() if name != GUESSED}
        ),
    )


def _linked(node: Schema, names: Mapping[str, str]) -> Schema:
    return _mapped(node, lambda part: {"$ref": f"#/$defs/{names[part['$ref']]}"} if "$ref" in part else part)


#: Keywords of a form that hold schemas: one, several, or several by name.
_ONE, _LISTS, _BY_NAME = (
    ("items", "additionalProperties", "propertyNames"),
    ("anyOf", "oneOf", "prefixItems"),
    ("properties", "patternProperties"),
)


def _mapped(node: Schema, change: Any) -> Schema:
    """Return a form with `change` made to every object in it, from the inside out."""
    if isinstance(node, bool):
        return node
    mapped: dict[str, Any] = dict(node)
    for name in _ONE:
        if name in mapped:
            mapped[name] = _mapped(mapped[name], change)
    for name in _LISTS:
        if name in mapped:
            mapped[name] = [_mapped(inner, change) for inner in mapped[name]]
    for name in _BY_NAME:
        if name in mapped:
            mapped[name] = {key: _mapped(inner, change) for key, inner in mapped[name].items()}
    changed: dict[str, Any] = change(mapped)
    return changed


def _inside(node: Schema) -> list[dict[str, Any]]:
    """Return every object of a form."""
    parts: list[dict[str, Any]] = []

    def collect(part: dict[str, Any]) -> dict[str, Any]:
        parts.append(part)
        return part

    _mapped(node, collect)
    return parts
