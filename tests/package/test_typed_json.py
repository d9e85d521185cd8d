"""Dataclasses from JSON: hostile values are refused with a typed error, and none is taken over as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from millpond.errors import DataError, OptionError
from millpond.typed_json import MAX_BYTES, Number, as_type, from_json, parse_json, read_json, to_json


@dataclass(frozen=True)
class Part:
    name: str
    share: Annotated[float, Number(at_least=0)] = 0.0


@dataclass(frozen=True)
class Whole:
    kind: Literal["a", "b"]
    count: Annotated[int, Number(at_least=1)]
    rate: Annotated[float, Number(above=0)]
    parts: tuple[Part, ...] = ()
    table: Mapping[int, Annotated[float, Number()]] = field(default_factory=dict)
    pair: tuple[int, str] | None = None
    loose: float = 0.0
    hidden: int = field(default=3, init=False)


GOOD: dict[str, Any] = {"kind": "a", "count": 2, "rate": 3}
DEEP: Any = json.loads("[" * 400 + "]" * 400)


def test_nested_dataclasses_come_back() -> None:
    whole = Whole("b", 1, 0.5, (Part("x", 1.0), Part("y")), {3: 4.0}, (5, "z"))
    written = json.loads(json.dumps({**to_json(whole), "parts": [to_json(part) for part in whole.parts]}))
    assert from_json(Whole, written) == whole
    found = from_json(Whole, GOOD)
    assert found.rate == 3.0
    assert type(found.rate) is float


def test_a_number_without_bounds_may_be_infinite() -> None:
    assert from_json(Whole, GOOD | {"loose": float("-inf")}).loose == float("-inf")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "c"},
        {"kind": ["a"]},
        {"count": 0},
        {"count": True},
        {"count": 1.0},
        {"count": 10**4000},
        {"rate": 0},
        {"rate": -1},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"rate": 10**400},
        {"rate": "1"},
        {"rate": True},
        {"rate": None},
        {"parts": {}},
        {"parts": "ab"},
        {"parts": [None]},
        {"parts": [{"name": 1}]},
        {"parts": [{"name": "x", "share": float("nan")}]},
        {"parts": [{"name": "x", "other": 1}]},
        {"parts": [{}]},
        {"table": {"x": 1}},
        {"table": {"9" * 5000: 1}},
        {"table": {"1": 10**400}},
        {"table": [1]},
        {"pair": [1]},
        {"pair": [1, "a", 2]},
        {"pair": ["1", "a"]},
        {"hidden": 4},
        {"__class__": 1},
        *({name: DEEP} for name in ("kind", "count", "rate", "parts", "table", "pair", "loose")),
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_hostile_value_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="send the request once more"):
        from_json(Whole, GOOD | change)
    with pytest.raises(TypeError):
        as_type(Whole, GOOD | change)


@pytest.mark.parametrize("values", [None, [], "x", 3, {"kind": "a"}], ids=str)
def test_what_is_no_object_or_lacks_fields_is_refused(values: Any) -> None:
    with pytest.raises(DataError):
        from_json(Whole, values)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"\xff", b"[" * 50_000, b'{"format": 2}', b"{}", b'{"format": ' + b"9" * 5000 + b"}"]
)
def test_a_text_of_another_format_is_refused(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"name: .*; make one$"):
        parse_json(text, "name", "plan", 1, "make one")
    (tmp_path / "plan.json").write_bytes(text)
    with pytest.raises(DataError, match="make one"):
        read_json(str(tmp_path / "plan.json"), "plan", 1, "make one")


def test_a_file_is_read_within_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(b'{"format": 1}'.ljust(MAX_BYTES))
    assert read_json(str(file), "plan", 1, "make one") == {"format": 1}
    file.write_bytes(b'{"format": 1}'.ljust(MAX_BYTES + 1))
    with pytest.raises(DataError, match="a plan has at most 1,048,576; make one"):
        read_json(str(file), "plan", 1, "make one")
    with pytest.raises(OptionError):
        read_json(str(tmp_path / "none.json"), "plan", 1, "make one")
