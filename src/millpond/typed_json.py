"""Dataclasses from and to JSON, checked by their type hints, and JSON files of one format."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from millpond.errors import DataError
from millpond.option_files import read_file

T = TypeVar("T")

#: Most bytes of a file that `read_json` reads.
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Number:
    """Bounds of a finite number, in `Annotated[float, Number(at_least=0)]`."""

    at_least: float = -math.inf
    above: float = -math.inf

    def check(self, value: float) -> None:
        """Check a number against the bounds.

        Raises:
            TypeError: it is not finite, or out of the bounds.
        """
        finite = abs(value) <= sys.float_info.max
        if not finite or not value >= self.at_least or not value > self.above:
            raise TypeError(f"{_shown(value, 40)} is no finite number of its field's range")


def to_json(value: Any, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, without `leave_out`."""
    attributes = {field.name: getattr(value, field.name) for field in fields(value) if field.name not in leave_out}
    return {field.name: attributes[field.name] for field in fields(value) if _differs(field, attributes)}


def from_json(kind: type[T], values: Any) -> T:
    """Return an instance of a dataclass from JSON, where tuples are lists and keys are texts.

    Raises:
        DataError: a field that the class does not have, or a value of another type. Also what the class raises.
    """
    try:
        made: T = as_type(kind, values)
        return made
    except TypeError as error:
        raise DataError(f"fields of {kind.__name__} do not fit ({error}): send the request once more") from None


def read_json(path: str, what: str, version: int, way_out: str) -> dict[str, Any]:
    """Return the object that a file holds, see `parse_json`.

    Raises:
        OptionError: it cannot be opened.
        DataError: it is too large, or as `parse_json`.
    """
    raw = read_file(path)
    if len(raw) > MAX_BYTES:
        raise DataError(f"{path}: {len(raw):,} bytes, a {what} has at most {MAX_BYTES:,}; {way_out}")
    return parse_json(raw, path, what, version, way_out)


def parse_json(text: str | bytes, name: str, what: str, version: int, way_out: str) -> dict[str, Any]:
    """Return the object of a JSON text whose field `format` is `version`.

    Args:
        text: The text.
        name: Name of the text, for messages.
        what: Kind of the text, for messages.
        version: Version that it must have.
        way_out: What to do, for messages.

    Raises:
        DataError: it is no JSON, or of another format.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: no JSON: {error}; {way_out}") from None
    if not isinstance(data, dict) or data.get("format") != version:
        raise DataError(f"{name}: not a {what} of this version; {way_out}")
    return data


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields, cached: finding them takes longer than a request."""
    return get_type_hints(kind, include_extras=True)


def _differs(field: Field[Any], attributes: Mapping[str, Any]) -> bool:
    if field.name not in attributes:
        return False
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return default is MISSING or attributes[field.name] != default


def as_type(hint: Any, value: Any) -> Any:
    """Return JSON as a type hint has it.

    Hints are dataclasses, tuples, mappings, unions, literals, plain and bounded numbers.

    Raises:
        TypeError: it is of another type. Also what a dataclass raises.
    """
    if type(value) is hint:
        return value
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if kind in (Union, types.UnionType):
        return _as_one_of(parts, value)
    if kind is Annotated:
        number = as_type(parts[0], value)
        parts[1].check(number)
        return float(number) if parts[0] is float else number
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return _instance(hint, value)
    if kind is Literal:
        if value in parts and type(value) is str:
            return value
    elif kind is tuple and isinstance(value, list | tuple):
        if parts[1:] == (...,):
            return tuple(as_type(parts[0], element) for element in value)
        if len(parts) == len(value):
            return tuple(as_type(part, element) for part, element in zip(parts, value, strict=True))
    elif kind is not None and isinstance(kind, type) and issubclass(kind, Mapping) and isinstance(value, dict):
        return {_key(parts[0], name): as_type(parts[1], element) for name, element in value.items()}
    elif hint is float and type(value) in (int, float):
        return value
    elif hint is None and value is None:
        return None
    raise TypeError(f"{_shown(value, 40)!r} is no {hint}")


def _instance(kind: Any, values: dict[str, Any]) -> Any:
    hints = _hints(kind)
    if not values.keys() <= hints.keys():
        raise TypeError(f"{_shown(values, 80)} does not hold the fields of {kind.__name__}")
    return kind(**{name: as_type(hints[name], value) for name, value in values.items()})


def _key(hint: Any, name: str) -> Any:
    try:
        return int(name) if hint is int else str(name)
    except ValueError:
        raise TypeError(f"key {_shown(name, 40)} is no whole number") from None


def _shown(value: Any, most: int) -> str:
    try:
        return str(value)[:most]
    except RecursionError:
        return f"a {type(value).__name__} nested too deep"


def _as_one_of(hints: tuple[Any, ...], value: Any) -> Any:
    for hint in hints:
        try:
            return as_type(hint, value)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"{_shown(value, 40)!r} is none of {hints}")
