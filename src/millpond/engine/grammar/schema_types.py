"""Forms of JSON schemas of one type: what xgrammar enforces of strings, numbers, arrays and objects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from millpond.engine.grammar.patterns import check_pattern
from millpond.errors import OptionError

Schema = dict[str, Any] | bool

#: What is said to people, and changes no value.
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
#: A mark, while a schema is written, of a type that it does not name: values of others follow it, too.
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
_MOST = 2**53
_MOST_COUNT, _MOST_STEP = 10_000, 1_024


class Forms:
    """Writes schemas of one type or several; where schemas stand inside, `schema` writes them."""

    def schema(self, given: Any, where: str, depth: int) -> Schema:
        """A schema inside another."""
        raise NotImplementedError

    def schemas(self, given: Any, where: str, depth: int) -> dict[str, Schema]:
        """Schemas by name; the names are no keywords."""
        if not isinstance(given, Mapping):
            raise bad(where, "", f"schemas by name are needed, not {shown(given)}")
        return {
            str(name): self.schema(one, f"{where}/{str(name).replace('~', '~0').replace('/', '~1')}", depth + 1)
            for name, one in given.items()
        }

    def types(self, given: Any, where: str) -> list[str]:
        """The types that are named, in their order."""
        named = given if isinstance(given, list) else [given]
        if not named or any(one not in _TYPES for one in named):
            raise bad(where, "type", f"{shown(given)} is none of {', '.join(_TYPES)}, nor a list of them")
        return list(dict.fromkeys(named))

    def typed(self, said: dict[str, Any], where: str, depth: int) -> Schema:
        """A schema without references and choices: one form for each of its types."""
        known = frozenset().union(*_OF_TYPE.values())
        for name in said:
            if name not in known and name != "type":
                raise bad(where, name, "it cannot be enforced")
        guessed = {} if "type" in said else {GUESSED: True}
        if "type" in said:
            types = self.types(said.pop("type"), where)
        elif not said:
            return True
        else:  # values of other types would do as well, but these are meant
            types = [kind for kind in ("object", "array", "string", "number") if _OF_TYPE[kind] & said.keys()]
            if len(types) > 1:
                raise bad(where, "type", f"it is needed where {' and '.join(sorted(said))} stand together")
        if "number" in types and "integer" in types:
            types.remove("integer")
        taken = frozenset().union(*(_OF_TYPE.get(kind, frozenset()) for kind in types))
        idle = sorted(said.keys() - taken)
        if idle:
            raise bad(where, idle[0], f"it says nothing of type {' or '.join(types)}")
        made = [self._of_type(kind, said, where, depth) | guessed for kind in types]
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _of_type(self, kind: str, said: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        own = {name: value for name, value in said.items() if name in _OF_TYPE.get(kind, ())}
        if kind == "string":
            return {"type": kind} | _string(own, where)
        if kind in ("number", "integer"):
            return {"type": kind} | (_integer(own, where) if kind == "integer" else _number(own, where))
        if kind == "array":
            return {"type": kind} | self._array(own, where, depth)
        if kind == "object":
            return {"type": kind} | self._object(own, where, depth)
        return {"type": kind}

    def _array(self, own: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        if own.get("uniqueItems", False) is not False:
            raise bad(where, "uniqueItems", "it cannot be enforced")
        least, most = count(own, "minItems", where), count(own, "maxItems", where)
        given = own.get("prefixItems", [])
        if not isinstance(given, list):
            raise bad(where, "prefixItems", "a list of schemas is needed")
        first = [self.schema(one, f"{where}/prefixItems/{place}", depth + 1) for place, one in enumerate(given)]
        rest: Schema = True
        if "items" in own or "unevaluatedItems" in own:
            name = "items" if "items" in own else "unevaluatedItems"
            rest = self.schema(own[name], f"{where}/{name}", depth + 1)
        if most is not None and most < (least or 0):
            raise bad(where, "maxItems", f"{most} is less than minItems {least}")
        if not first:
            return {"items": rest} | _given(minItems=least, maxItems=most)
        if False in first:  # no item can stand there, and none after it
            first, rest = first[: first.index(False)], False
        first = [{} if one is True else one for one in first]  # the only way that xgrammar reads it here
        if most is not None and most <= len(first):
            first, rest, most = first[:most], False, None
        if rest is False and (least or 0) > len(first):
            raise bad(where, "minItems", f"{least} items are wanted, and only {len(first)} may be there")
        if not first:
            return {"items": False}
        return {"prefixItems": first, "items": rest} | _given(minItems=least, maxItems=most)

    def _object(self, own: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        least, most = count(own, "minProperties", where), count(own, "maxProperties", where)
        declared = self.schemas(own.get("properties", {}), f"{where}/properties", depth)
        patterned = self.schemas(own.get("patternProperties", {}), f"{where}/patternProperties", depth)
        rest: Schema | None = None
        for name in ("additionalProperties", "unevaluatedProperties"):
            if name in own and rest is None:
                rest = self.schema(own[name], f"{where}/{name}", depth + 1)
        required = own.get("required", [])
        if not isinstance(required, list) or any(not isinstance(name, str) for name in required):
            raise bad(where, "required", "a list of names is needed")
        required = list(dict.fromkeys(required))
        undeclared = [name for name in required if name not in declared]
        names = None
        if "propertyNames" in own:
            names = self.schema(own["propertyNames"], f"{where}/propertyNames", depth + 1)
        for name, there in (("propertyNames", names is not None), ("patternProperties", bool(patterned))):
            if there and (declared or undeclared):
                raise bad(where, name, "together with properties or required it cannot be enforced")
            if there and (least or most is not None):
                bound = "minProperties" if least else "maxProperties"
                raise bad(where, bound, f"together with {name} it cannot be enforced")
        if patterned:
            return self._by_pattern(patterned, rest, names, where)
        if undeclared and rest is False:
            raise bad(where, "required", f"{shown(undeclared[0])} is required, and additionalProperties forbid it")
        declared |= {name: True if rest is None else rest for name in undeclared}
        if rest is None and declared:
            rest = False
        if (least or 0) > 1 and rest is not False:
            raise bad(where, "minProperties", "it cannot be enforced where names are free: one may come twice")
        if most is not None and most < max(least or 0, len(required)):
            raise bad(where, "maxProperties", f"{most} is less than what is required")
        if rest is False and (least or 0) > len(declared):
            raise bad(where, "minProperties", f"{least} properties are wanted, and only {len(declared)} may be there")
        made: dict[str, Any] = {"additionalProperties": True if rest is None else rest}
        if declared:
            made |= {"properties": declared, "required": required}
        return made | _given(propertyNames=names, minProperties=least or None, maxProperties=most)

    @staticmethod
    def _by_pattern(
        patterned: dict[str, Schema], rest: Schema | None, names: Schema | None, where: str
    ) -> dict[str, Any]:
        """An object whose names follow one expression."""
        if len(patterned) > 1:
            raise bad(where, "patternProperties", "more than one expression cannot be enforced")
        if rest not in (None, False) or names is not None:
            other = "propertyNames" if names is not None else "additionalProperties"
            raise bad(where, other, "together with patternProperties it cannot be enforced")
        (pattern,) = patterned
        check_pattern(pattern, f"{where}: patternProperties")
        return {"patternProperties": patterned, "additionalProperties": False}


def _string(own: dict[str, Any], where: str) -> dict[str, Any]:
    least, most = count(own, "minLength", where) or None, count(own, "maxLength", where)
    pattern, form = own.get("pattern"), own.get("format")
    if pattern is not None:
        if not isinstance(pattern, str):
            raise bad(where, "pattern", f"an expression is needed, not {shown(pattern)}")
        check_pattern(pattern, f"{where}: pattern")
    if form is not None and form not in FORMATS:
        raise bad(where, "format", f"{shown(form)} is none that can be enforced ({', '.join(sorted(FORMATS))})")
    if pattern is not None and form is not None:
        raise bad(where, "format", "together with pattern it cannot be enforced")
    if (pattern is not None or form is not None) and (least is not None or most is not None):
        name, other = "maxLength" if least is None else "minLength", "pattern" if form is None else "format"
        raise bad(where, name, f"together with {other} it cannot be enforced")
    if most is not None and most < (least or 0):
        raise bad(where, "maxLength", f"{most} is less than minLength {least}")
    return _given(minLength=least, maxLength=most, pattern=pattern, format=form)


def _number(own: dict[str, Any], where: str) -> dict[str, Any]:
    if "multipleOf" in own:
        raise bad(where, "multipleOf", "it cannot be enforced for type number")
    bounds = {name: _bound(own, name, where) for name in own}
    least = max((bounds[n] for n in ("minimum", "exclusiveMinimum") if n in bounds), default=-math.inf)
    most = min((bounds[n] for n in ("maximum", "exclusiveMaximum") if n in bounds), default=math.inf)
    open_ended = least == bounds.get("exclusiveMinimum") or most == bounds.get("exclusiveMaximum")
    if least > most or (least == most and open_ended):
        raise bad(where, "minimum", f"no number lies between {least} and {most}")
    made: dict[str, Any] = {}
    for exclusive, plain, end in (("exclusiveMinimum", "minimum", least), ("exclusiveMaximum", "maximum", most)):
        if not math.isinf(end):
            made[exclusive if bounds.get(exclusive) == end else plain] = end
    return made


def _integer(own: dict[str, Any], where: str) -> dict[str, Any]:
    step = own.get("multipleOf")
    bounds = {name: _bound(own, name, where) for name in own if name != "multipleOf"}
    least = max([math.ceil(bounds.get("minimum", -_MOST)), math.floor(bounds.get("exclusiveMinimum", -_MOST - 1)) + 1])
    most = min([math.floor(bounds.get("maximum", _MOST)), math.ceil(bounds.get("exclusiveMaximum", _MOST + 1)) - 1])
    if "multipleOf" in own and not (is_number(step) and step > 0 and step == int(step)):
        raise bad(where, "multipleOf", f"a whole number above 0 can be enforced, not {shown(step)}")
    if step is not None and step > _MOST_STEP:
        raise bad(where, "multipleOf", f"{shown(step)} is more than the {_MOST_STEP:,} that can be enforced")
    if step is not None and bounds:
        raise bad(where, "multipleOf", f"together with {sorted(bounds)[0]} it cannot be enforced")
    if least > most:
        raise bad(where, "minimum", f"no whole number lies between {least} and {most}")
    made = _given(multipleOf=None if step is None else int(step))
    if {"minimum", "exclusiveMinimum"} & bounds.keys():
        made["minimum"] = least
    if {"maximum", "exclusiveMaximum"} & bounds.keys():
        made["maximum"] = most
    return made


def _bound(own: Mapping[str, Any], name: str, where: str) -> float:
    value = own[name]
    if not is_number(value) or not abs(value) <= _MOST:
        raise bad(where, name, f"a number of at most {_MOST:,} either way is needed, not {shown(value)}")
    return value


def count(own: Mapping[str, Any], name: str, where: str) -> int | None:
    """A keyword that counts; None where it is not there."""
    value = own.get(name)
    if name not in own:
        return None
    if not is_number(value) or value != int(value) or value < 0:
        raise bad(where, name, f"a whole number of at least 0 is needed, not {shown(value)}")
    if value > _MOST_COUNT:
        raise bad(where, name, f"{value:,} is more than the {_MOST_COUNT:,} that can be enforced")
    return int(value)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a JSON value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def bad(where: str, keyword: str, why: str) -> OptionError:
    """A schema that is refused, with the place and the keyword."""
    name = f"{keyword} " if keyword else ""
    return OptionError(f"json_schema: {name}at {_short(where)}: {why}")


def shown(value: Any) -> str:
    """A value in an error, cut where it is long."""
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def _given(**keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value is not None}
