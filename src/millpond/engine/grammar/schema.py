"""JSON schemas that clients send: bounded, satisfiable, every keyword enforced or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from millpond.engine.grammar.schema_types import ANNOTATIONS, DEFINITIONS, GUESSED, Forms, Schema, bad, shown
from millpond.errors import OptionError

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


#: Of one schema at most: bytes of JSON, schemas inside it, schemas inside each other, values of all `enum` together,
#: and places that a `$ref` points to.
MOST_BYTES, MOST_SCHEMAS, MOST_DEPTH, MOST_VALUES, MOST_REFS = 128 * 1024, 2_000, 32, 1_000, 200


def enforceable(schema: Any) -> Schema:
    """A schema that xgrammar enforces to the letter, and whose values are all values of `schema`.

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
    if size > MOST_BYTES:
        raise OptionError(f"json_schema has {size:,} bytes and may have {MOST_BYTES:,}")
    walk = _Walk()
    root = walk.schema(schema, "#", 0)
    names = walk.names()
    definitions = {name: _linked(walk.found[place], names) for place, name in names.items()}
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
    """Goes through the schemas in a schema, and through nothing else in it: names of properties are no keywords.

    Attributes:
        found: place -> schema, in a form that is enforced, its references by place still.
    """

    def __init__(self) -> None:
        self.found: dict[str, Schema] = {}
        self._refs: dict[str, str] = {}  # place that is pointed to -> where that is said
        self._values = 0

    def names(self) -> dict[str, str]:
        """Every place that something points to, with a name of its own.

        Raises:
            OptionError: there is no schema at such a place, or there are too many of them.
        """
        for place, where in self._refs.items():
            if place not in self.found:
                raise bad(where, "$ref", f"there is no schema at {place!r} inside this one")
        if len(self._refs) > MOST_REFS:
            raise OptionError(f"json_schema points to {len(self._refs):,} places and may to {MOST_REFS:,}")
        return {place: f"r{number}" for number, place in enumerate(self._refs)}

    def schema(self, given: Any, where: str, depth: int) -> Schema:
        """The schema at a place in a form that is enforced."""
        if len(self.found) >= MOST_SCHEMAS:
            raise OptionError(f"json_schema holds more than {MOST_SCHEMAS:,} schemas")
        if depth > MOST_DEPTH:
            raise OptionError(f"json_schema has schemas inside each other more than {MOST_DEPTH} deep, at {where}")
        if not isinstance(given, Mapping | bool):
            raise bad(where, "", f"a schema is an object or a boolean, not {shown(given)}")
        self.found[where] = True  # its place in the count
        made = given if isinstance(given, bool) else self._written(dict(given), where, depth)
        self.found[where] = made
        return made

    def _written(self, given: dict[str, Any], where: str, depth: int) -> Schema:
        for kept in DEFINITIONS & given.keys():
            self.schemas(given.pop(kept), f"{where}/{kept}", depth)
        said = {name: value for name, value in given.items() if name not in ANNOTATIONS and not name.startswith("x-")}
        if "$ref" in said:
            return self._reference(said, where)
        if "const" in said or "enum" in said:
            return self._among(said, where)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in said:
                return self._several(name, said, where, depth)
        return self.typed(said, where, depth)

    def _reference(self, said: dict[str, Any], where: str) -> Schema:
        alone(said, "$ref", where)
        place = said["$ref"]
        if not isinstance(place, str) or not (place == "#" or place.startswith("#/")):
            raise bad(where, "$ref", f"{shown(place)} is outside this schema; only '#' and '#/...' can be followed")
        self._refs.setdefault(place, where)
        return {"$ref": place}

    def _among(self, said: dict[str, Any], where: str) -> Schema:
        types = said.pop("type", None)
        name = "const" if "const" in said else "enum"
        alone(said, name, where)
        values = [said[name]] if name == "const" else said[name]
        if not isinstance(values, list) or not values:
            raise bad(where, name, "a list of at least one value is needed")
        self._values += len(values)
        if self._values > MOST_VALUES:
            raise OptionError(f"json_schema lists more than {MOST_VALUES:,} values in enum, at {where}")
        if types is not None:
            wanted = self.types(types, where)
            wrong = [value for value in values if not any(is_of(value, one) for one in wanted)]
            if wrong:
                raise bad(where, name, f"{shown(wrong[0])} is not of the schema's type")
        return {"enum": values}

    def _several(self, name: str, said: dict[str, Any], where: str, depth: int) -> Schema:
        alone(said, name, where)
        given = said[name]
        if not isinstance(given, list) or not given:
            raise bad(where, name, "a list of at least one schema is needed")
        if name == "allOf" and len(given) > 1:
            raise bad(where, name, "more than one schema at a time cannot be enforced; write them as one")
        made = [self.schema(one, f"{where}/{name}/{place}", depth + 1) for place, one in enumerate(given)]
        return made[0] if len(made) == 1 else {name: made}


def alone(said: Mapping[str, Any], name: str, where: str) -> None:
    """Raises:
    OptionError: a keyword would hide another one next to it.
    """
    others = sorted(said.keys() - {name})
    if others:
        raise bad(where, others[0], f"together with {name} it cannot be enforced")


def is_of(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a type of JSON schemas."""
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == {str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]


def _check_choices(node: Schema, definitions: Mapping[str, Schema]) -> None:
    """Raises:
    OptionError: a `oneOf` whose schemas may share a value: only one of them at most may hold.
    """
    for one in _inside(node):
        found = one.get("oneOf", ())
        if len(found) > MOST_PARTS:
            raise OptionError(f"json_schema: oneOf of {len(found)} schemas; at most {MOST_PARTS} can be enforced")
        for place, first in enumerate(found):
            if not all(disjoint(first, other, definitions) for other in found[place + 1 :]):
                raise OptionError(
                    "json_schema: oneOf cannot be enforced where two of its schemas may hold for one value; use anyOf, "
                    "or give each a required property with a const of its own"
                )


def _finished(node: Schema) -> Schema:
    """What was found to be disjoint as a plain choice, and without marks."""
    return _mapped(
        node,
        lambda one: (
            {"anyOf": one["oneOf"]} if "oneOf" in one else {name: part for name, part in one.items() if name != GUESSED}
        ),
    )


def _linked(node: Schema, names: Mapping[str, str]) -> Schema:
    return _mapped(node, lambda one: {"$ref": f"#/$defs/{names[one['$ref']]}"} if "$ref" in one else one)


#: Where schemas stand in a form: one, several, or several by name.
_ONE, _LISTS, _BY_NAME = (
    ("items", "additionalProperties", "propertyNames"),
    ("anyOf", "oneOf", "prefixItems"),
    ("properties", "patternProperties"),
)


def _mapped(node: Schema, change: Any) -> Schema:
    """A form with `change` made to every object in it, from the inside out."""
    if isinstance(node, bool):
        return node
    made: dict[str, Any] = dict(node)
    for name in _ONE:
        if name in made:
            made[name] = _mapped(made[name], change)
    for name in _LISTS:
        if name in made:
            made[name] = [_mapped(one, change) for one in made[name]]
    for name in _BY_NAME:
        if name in made:
            made[name] = {key: _mapped(one, change) for key, one in made[name].items()}
    changed: dict[str, Any] = change(made)
    return changed


def _inside(node: Schema) -> list[dict[str, Any]]:
    """Every object of a form."""
    found: list[dict[str, Any]] = []

    def note(one: dict[str, Any]) -> dict[str, Any]:
        found.append(one)
        return one

    _mapped(node, note)
    return found
