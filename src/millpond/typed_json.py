"""Dataclasses from and to JSON, checked by their type hints."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from millpond.errors import DataError

T = TypeVar("T")


def to_json(value: Any, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, without `leave_out`."""
    attributes = {field.name: getattr(value, field.name) for field in fields(value) if field.name not in leave_out}
    return {field.name: attributes[field.name] for field in fields(value) if _differs(field, attributes)}


def from_json(kind: type[T], values: Any) -> T:
    """Return an instance of a dataclass from JSON, where tuples are lists and keys are texts.

    Raises:
        DataError: a field that the class does not have, or a value of another type. Also what the class raises.
    """
    hints = _hints(kind)  # type: ignore[arg-type]  # mypy: a class is hashable
    if not isinstance(values, dict) or not values.keys() <= hints.keys():
        raise DataError(f"{str(values)[:80]} does not hold the fields of {kind.__name__}: send the request once more")
    try:
        return kind(**{name: _as(hints[name], value) for name, value in values.items()})
    except TypeError as error:
        raise DataError(f"fields of {kind.__name__} do not fit ({error}): send the request once more") from None


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields, cached: finding them takes longer than a request."""
    return get_type_hints(kind)


def _differs(field: Field[Any], attributes: Mapping[str, Any]) -> bool:
    if field.name not in attributes:
        return False
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return default is MISSING or attributes[field.name] != default


def _as(hint: Any, value: Any) -> Any:
    """Return `value` as the hint has it.

    Raises:
        TypeError: it is of another type.
    """
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if kind in (Union, types.UnionType):
        return _as_one_of(parts, value)
    if kind is Literal:
        if value in parts and type(value) is str:
            return value
    elif kind is tuple and isinstance(value, list | tuple):
        if parts[1:] == (...,):
            return tuple(_as(parts[0], element) for element in value)
        if len(parts) == len(value):
            return tuple(_as(part, element) for part, element in zip(parts, value, strict=True))
    elif kind is not None and isinstance(kind, type) and issubclass(kind, Mapping) and isinstance(value, dict):
        key = int if parts[0] is int else str
        return {key(name): _as(parts[1], element) for name, element in value.items()}
    elif hint is float and type(value) in (int, float):
        return value
    elif hint is type(None) or hint is None:
        if value is None:
            return None
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise TypeError(f"{str(value)[:40]!r} is no {hint}")


def _as_one_of(hints: tuple[Any, ...], value: Any) -> Any:
    for hint in hints:
        try:
            return _as(hint, value)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"{str(value)[:40]!r} is none of {hints}")
