"""Forms of JSON schemas of one type: what xgrammar enforces of strings, numbers, arrays and objects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from millpond.engine.grammar.patterns import check_pattern
from millpond.errors import OptionError

Schema = dict[str, Any] | bool

#: Keywords for people, which change no value.
ANNOTATIONS = frozenset(
    {
        "$comment",
        "$id",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
#: Schemas by name, for `$ref`.
DEFINITIONS = frozenset({"$defs", "definitions"})
#: Marks a type inferred from keywords such as `minLength`: values of other types are valid too.
GUESSED = "guessed"
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems", "uniqueItems"}),
    "object": frozenset(
        {
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "unevaluatedProperties",
        }
    ),
}
_OF_TYPE["integer"] = _OF_TYPE["number"]
#: Formats of strings whose shape is enforced (a 31st of April has the shape of a date).
FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    }
)
#: Numbers beyond it are not read as whole numbers everywhere.
_MAX_INT = 2**53
_MAX_COUNT, _MAX_STEP = 10_000, 1_024


class Forms:
    """Writes schemas of one type or several; `schema` writes the schemas inside them."""

    def schema(self, raw_schema: Any, location: str, depth: int) -> Schema:
        """Return the form of a schema inside another."""
        raise NotImplementedError

    def schemas(self, raw_schemas: Any, location: str, depth: int) -> dict[str, Schema]:
        """Return the forms of schemas by name; the names are no keywords."""
        if not isinstance(raw_schemas, Mapping):
            raise bad(location, "", f"schemas by name are needed, not {shown(raw_schemas)}")
        return {
            str(name): self.schema(
                raw_schema, f"{location}/{str(name).replace('~', '~0').replace('/', '~1')}", depth + 1
            )
            for name, raw_schema in raw_schemas.items()
        }

    def types(self, raw_types: Any, location: str) -> list[str]:
        """Return the types that are named, in their order."""
        names = raw_types if isinstance(raw_types, list) else [raw_types]
        if not names or any(name not in _TYPES for name in names):
            raise bad(location, "type", f"{shown(raw_types)} is none of {', '.join(_TYPES)}, nor a list of them")
        return list(dict.fromkeys(names))

    def typed(self, keywords: dict[str, Any], location: str, depth: int) -> Schema:
        """Return a schema without references and choices: one form for each of its types."""
        enforced_keywords = frozenset().union(*_OF_TYPE.values())
        for name in keywords:
            if name not in enforced_keywords and name != "type":
                raise bad(location, name, "it cannot be enforced")
        guessed = {} if "type" in keywords else {GUESSED: True}
        if "type" in keywords:
            types = self.types(keywords.pop("type"), location)
        elif not keywords:
            return True
        else:  # values of other types would do as well, but these are meant
            types = [kind for kind in ("object", "array", "string", "number") if _OF_TYPE[kind] & keywords.keys()]
            if len(types) > 1:
                raise bad(location, "type", f"it is needed where {' and '.join(sorted(keywords))} stand together")
        if "number" in types and "integer" in types:
            types.remove("integer")
        used_keywords = frozenset().union(*(_OF_TYPE.get(kind, frozenset()) for kind in types))
        unused_keywords = sorted(keywords.keys() - used_keywords)
        if unused_keywords:
            raise bad(location, unused_keywords[0], f"it says nothing of type {' or '.join(types)}")
        forms = [self._of_type(kind, keywords, location, depth) | guessed for kind in types]
        return forms[0] if len(forms) == 1 else {"anyOf": forms}

    def _of_type(self, kind: str, keywords: dict[str, Any], location: str, depth: int) -> dict[str, Any]:
        type_keywords = {name: value for name, value in keywords.items() if name in _OF_TYPE.get(kind, ())}
        if kind == "string":
            return {"type": kind} | _string(type_keywords, location)
        if kind in ("number", "integer"):
            return {"type": kind} | (
                _integer(type_keywords, location) if kind == "integer" else _number(type_keywords, location)
            )
        if kind == "array":
            return {"type": kind} | self._array(type_keywords, location, depth)
        if kind == "object":
            return {"type": kind} | self._object(type_keywords, location, depth)
        return {"type": kind}

    def _array(self, keywords: dict[str, Any], location: str, depth: int) -> dict[str, Any]:
        if keywords.get("uniqueItems", False) is not False:
            raise bad(location, "uniqueItems", "it cannot be enforced")
        min_items, max_items = count(keywords, "minItems", location), count(keywords, "maxItems", location)
        raw_items = keywords.get("prefixItems", [])
        if not isinstance(raw_items, list):
            raise bad(location, "prefixItems", "a list of schemas is needed")
        prefix_items = [
            self.schema(raw_item, f"{location}/prefixItems/{index}", depth + 1)
            for index, raw_item in enumerate(raw_items)
        ]
        other_items: Schema = True
        if "items" in keywords or "unevaluatedItems" in keywords:
            name = "items" if "items" in keywords else "unevaluatedItems"
            other_items = self.schema(keywords[name], f"{location}/{name}", depth + 1)
        if max_items is not None and max_items < (min_items or 0):
            raise bad(location, "maxItems", f"{max_items} is less than minItems {min_items}")
        if not prefix_items:
            return {"items": other_items} | _without_none(minItems=min_items, maxItems=max_items)
        if False in prefix_items:  # no item can stand there, and none after it
            prefix_items, other_items = prefix_items[: prefix_items.index(False)], False
        prefix_items = [
            {} if raw_item is True else raw_item for raw_item in prefix_items
        ]  # the only way that xgrammar reads it here
        if max_items is not None and max_items <= len(prefix_items):
            prefix_items, other_items, max_items = prefix_items[:max_items], False, None
        if other_items is False and (min_items or 0) > len(prefix_items):
            raise bad(location, "minItems", f"{min_items} items are wanted, and only {len(prefix_items)} may be there")
        if not prefix_items:
            return {"items": False}
        return {"prefixItems": prefix_items, "items": other_items} | _without_none(
            minItems=min_items, maxItems=max_items
        )

    def _object(self, keywords: dict[str, Any], location: str, depth: int) -> dict[str, Any]:
        min_properties, max_properties = (
            count(keywords, "minProperties", location),
            count(keywords, "maxProperties", location),
        )
        declared = self.schemas(keywords.get("properties", {}), f"{location}/properties", depth)
        patterned = self.schemas(keywords.get("patternProperties", {}), f"{location}/patternProperties", depth)
        other_properties: Schema | None = None
        for name in ("additionalProperties", "unevaluatedProperties"):
            if name in keywords and other_properties is None:
                other_properties = self.schema(keywords[name], f"{location}/{name}", depth + 1)
        required = keywords.get("required", [])
        if not isinstance(required, list) or any(not isinstance(name, str) for name in required):
            raise bad(location, "required", "a list of names is needed")
        required = list(dict.fromkeys(required))
        undeclared = [name for name in required if name not in declared]
        names = None
        if "propertyNames" in keywords:
            names = self.schema(keywords["propertyNames"], f"{location}/propertyNames", depth + 1)
        for name, exists in (("propertyNames", names is not None), ("patternProperties", bool(patterned))):
            if exists and (declared or undeclared):
                raise bad(location, name, "together with properties or required it cannot be enforced")
            if exists and (min_properties or max_properties is not None):
                bound = "minProperties" if min_properties else "maxProperties"
                raise bad(location, bound, f"together with {name} it cannot be enforced")
        if patterned:
            return self._by_pattern(patterned, other_properties, names, location)
        if undeclared and other_properties is False:
            raise bad(location, "required", f"{shown(undeclared[0])} is required, and additionalProperties forbid it")
        declared |= {name: True if other_properties is None else other_properties for name in undeclared}
        if other_properties is None and declared:
            other_properties = False
        if (min_properties or 0) > 1 and other_properties is not False:
            raise bad(location, "minProperties", "it cannot be enforced where names are free: one may come twice")
        if max_properties is not None and max_properties < max(min_properties or 0, len(required)):
            raise bad(location, "maxProperties", f"{max_properties} is less than what is required")
        if other_properties is False and (min_properties or 0) > len(declared):
            raise bad(
                location,
                "minProperties",
                f"{min_properties} properties are wanted, and only {len(declared)} may be there",
            )
        form: dict[str, Any] = {"additionalProperties": True if other_properties is None else other_properties}
        if declared:
            form |= {"properties": declared, "required": required}
        return form | _without_none(
            propertyNames=names, minProperties=min_properties or None, maxProperties=max_properties
        )

    @staticmethod
    def _by_pattern(
        patterned: dict[str, Schema], other_properties: Schema | None, names: Schema | None, location: str
    ) -> dict[str, Any]:
        """Return an object whose names follow one expression."""
        if len(patterned) > 1:
            raise bad(location, "patternProperties", "more than one expression cannot be enforced")
        if other_properties not in (None, False) or names is not None:
            conflicting = "propertyNames" if names is not None else "additionalProperties"
            raise bad(location, conflicting, "together with patternProperties it cannot be enforced")
        (pattern,) = patterned
        check_pattern(pattern, f"{location}: patternProperties")
        return {"patternProperties": patterned, "additionalProperties": False}


def _string(keywords: dict[str, Any], location: str) -> dict[str, Any]:
    min_length, max_length = count(keywords, "minLength", location) or None, count(keywords, "maxLength", location)
    pattern, format_name = keywords.get("pattern"), keywords.get("format")
    if pattern is not None:
        if not isinstance(pattern, str):
            raise bad(location, "pattern", f"an expression is needed, not {shown(pattern)}")
        check_pattern(pattern, f"{location}: pattern")
    if format_name is not None and format_name not in FORMATS:
        raise bad(
            location, "format", f"{shown(format_name)} is none that can be enforced ({', '.join(sorted(FORMATS))})"
        )
    if pattern is not None and format_name is not None:
        raise bad(location, "format", "together with pattern it cannot be enforced")
    if (pattern is not None or format_name is not None) and (min_length is not None or max_length is not None):
        name, conflicting = (
            "maxLength" if min_length is None else "minLength",
            "pattern" if format_name is None else "format",
        )
        raise bad(location, name, f"together with {conflicting} it cannot be enforced")
    if max_length is not None and max_length < (min_length or 0):
        raise bad(location, "maxLength", f"{max_length} is less than minLength {min_length}")
    return _without_none(minLength=min_length, maxLength=max_length, pattern=pattern, format=format_name)


def _number(keywords: dict[str, Any], location: str) -> dict[str, Any]:
    if "multipleOf" in keywords:
        raise bad(location, "multipleOf", "it cannot be enforced for type number")
    bounds = {name: _bound(keywords, name, location) for name in keywords}
    minimum = max((bounds[n] for n in ("minimum", "exclusiveMinimum") if n in bounds), default=-math.inf)
    maximum = min((bounds[n] for n in ("maximum", "exclusiveMaximum") if n in bounds), default=math.inf)
    open_ended = minimum == bounds.get("exclusiveMinimum") or maximum == bounds.get("exclusiveMaximum")
    if minimum > maximum or (minimum == maximum and open_ended):
        raise bad(location, "minimum", f"no number lies between {minimum} and {maximum}")
    form: dict[str, Any] = {}
    for exclusive, plain, end in (("exclusiveMinimum", "minimum", minimum), ("exclusiveMaximum", "maximum", maximum)):
        if not math.isinf(end):
            form[exclusive if bounds.get(exclusive) == end else plain] = end
    return form


def _integer(keywords: dict[str, Any], location: str) -> dict[str, Any]:
    step = keywords.get("multipleOf")
    bounds = {name: _bound(keywords, name, location) for name in keywords if name != "multipleOf"}
    minimum = max(
        [math.ceil(bounds.get("minimum", -_MAX_INT)), math.floor(bounds.get("exclusiveMinimum", -_MAX_INT - 1)) + 1]
    )
    maximum = min(
        [math.floor(bounds.get("maximum", _MAX_INT)), math.ceil(bounds.get("exclusiveMaximum", _MAX_INT + 1)) - 1]
    )
    if "multipleOf" in keywords and not (is_number(step) and step > 0 and step == int(step)):
        raise bad(location, "multipleOf", f"a whole number above 0 can be enforced, not {shown(step)}")
    if step is not None and step > _MAX_STEP:
        raise bad(location, "multipleOf", f"{shown(step)} is more than the {_MAX_STEP:,} that can be enforced")
    if step is not None and bounds:
        raise bad(location, "multipleOf", f"together with {sorted(bounds)[0]} it cannot be enforced")
    if minimum > maximum:
        raise bad(location, "minimum", f"no whole number lies between {minimum} and {maximum}")
    form = _without_none(multipleOf=None if step is None else int(step))
    if {"minimum", "exclusiveMinimum"} & bounds.keys():
        form["minimum"] = minimum
    if {"maximum", "exclusiveMaximum"} & bounds.keys():
        form["maximum"] = maximum
    return form


def _bound(keywords: Mapping[str, Any], name: str, location: str) -> float:
    value = keywords[name]
    if not is_number(value) or not abs(value) <= _MAX_INT:
        raise bad(location, name, f"a number of at most {_MAX_INT:,} either way is needed, not {shown(value)}")
    return value


def count(keywords: Mapping[str, Any], name: str, location: str) -> int | None:
    """Return the number of a keyword that counts; None where it is missing."""
    value = keywords.get(name)
    if name not in keywords:
        return None
    if not is_number(value) or value != int(value) or value < 0:
        raise bad(location, name, f"a whole number of at least 0 is needed, not {shown(value)}")
    if value > _MAX_COUNT:
        raise bad(location, name, f"{value:,} is more than the {_MAX_COUNT:,} that can be enforced")
    return int(value)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def bad(location: str, keyword: str, why: str) -> OptionError:
    """Return the error of a refused schema, with the location and the keyword."""
    name = f"{keyword} " if keyword else ""
    return OptionError(f"json_schema: {name}at {_short(location)}: {why}")


def shown(value: Any) -> str:
    """Return a value for an error, cut where it is long."""
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def _without_none(**keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value is not None}
