"""Ranges of numeric options: declared by every entry, checked, shown, and wide enough for all that is used."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any

import pytest

from millpond.budget import Budget
from millpond.cache.paging import PAGING
from millpond.errors import BudgetError, OptionError
from millpond.methods import METHODS
from millpond.methods._base import based_on
from millpond.option_ranges import MAX_POSITIONS, POSITIONS, SHARE, Range, check_parts
from millpond.registry import Option, Registry
from millpond_lab.evals.candidates.candidate import CANDIDATES
from millpond_lab.evals.task import TASKS
from tests.helpers.package.wheels import ROOT

REGISTRIES: tuple[Registry[Any], ...] = (METHODS, PAGING, CANDIDATES, TASKS)


def numeric(registries: tuple[Registry[Any], ...] = REGISTRIES) -> Iterator[tuple[str, Option]]:
    for registry in registries:
        for name in registry.names():
            yield from ((f"{name}.{one.name}", one) for one in registry.get(name).options.values() if one.numbers)


def undeclared(registries: tuple[Registry[Any], ...] = REGISTRIES) -> list[str]:
    return [name for name, option in numeric(registries) if not option.ranges]


def thing(weight: Annotated[int, "kilograms"] = 3, length: Annotated[int, "metres", Range(1, 9)] = 2) -> None:
    """A thing."""


def registry_of(build: Any) -> Registry[None]:
    made: Registry[None] = Registry("thing", "millpond.methods")
    made._walked = made._complete = True
    made.register("thing")(build)
    return made


def test_every_number_declares_its_range() -> None:
    assert undeclared() == []
    assert undeclared((registry_of(thing),)) == ["thing.weight"]


@pytest.mark.parametrize(("name", "option"), list(numeric()), ids=lambda value: value if isinstance(value, str) else "")
def test_ends_are_taken_and_what_is_beyond_is_not(name: str, option: Option) -> None:
    for kind, allowed in option.numbers.items():
        for end, beyond in ((allowed.low, -1), (allowed.high, 1)):
            inside = math.isfinite(end) and allowed.holds(kind(end))
            if inside:
                assert option.checked(kind(end), name) == kind(end)
            if not math.isfinite(end) or (kind is float and any(one.holds(end + beyond) for one in option.ranges)):
                continue
            with pytest.raises(OptionError) as found:
                option.checked(kind(end + beyond), name)
            assert f"{option.name}={kind(end + beyond)} must be {option.range_text}" in str(found.value)


@pytest.mark.parametrize(
    "value",
    [2**70, -(2**70), 10**5000, 1e308, math.nan, "nan", True, [], None, {}, "9" * 5000],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize(("method", "name"), [("h2o", "recent"), ("snapkv", "kernel"), ("dms", "window")])
def test_what_is_no_number_in_the_range_is_refused(method: str, name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"^{method}: {name}=") as found:
        METHODS.get(method)(**{name: value})
    assert METHODS.get(method).options[name].range_text in str(found.value)
    assert len(str(found.value)) < 250


def test_over_a_network_a_number_is_no_text() -> None:
    h2o, compactor = METHODS.get("h2o"), METHODS.get("compactor")
    assert h2o.check({"sinks": "5"}) == {"sinks": 5}
    assert h2o.check({"sinks": 5, "decode": "grow"}, typed=True) == {"sinks": 5, "decode": "grow"}
    assert compactor.check({"blend": "auto"}, typed=True) == {"blend": "auto"}
    with pytest.raises(OptionError, match="h2o: sinks='5' is not a valid int, 0 to 16,777,216"):
        h2o.check({"sinks": "5"}, typed=True)
    with pytest.raises(OptionError, match="compactor: blend='5' is not a valid float or str"):
        compactor.check({"blend": "5"}, typed=True)


def test_a_count_or_a_share_has_a_range_of_each() -> None:
    recent = METHODS.get("h2o").options["recent"]
    assert recent.numbers == {int: POSITIONS, float: SHARE}
    assert recent.range_text == "0 to 16,777,216 or 0 to 1"
    with pytest.raises(OptionError, match="declares 1 ranges and takes 2 kinds of numbers"):
        registry_of(lambda: None).register("other")(_with_one_range)


def _with_one_range(share: Annotated[int | float, "of the whole", SHARE] = 0.5) -> None:
    """One range too few."""


#: Values of options in files of results: "h2o/recent=0.25" of a table, {"method": ..., "options": ...} of a row.
_WRITTEN = re.compile(r"\b([a-z0-9_]+)((?:/[a-z_]+=[\w.+-]+)+)")


def test_values_in_pages_and_recorded_rows_are_taken() -> None:
    places = [
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/**/*"),
        *ROOT.glob("examples/**/*"),
        *ROOT.glob("*.md"),
    ]
    tried = 0
    for path in places:
        if path.suffix not in (".md", ".json", ".jsonl", ".sh", ".py") or not path.is_file():
            continue
        for name, options in set(_WRITTEN.findall(path.read_text(errors="replace"))):
            if name in METHODS.names():
                entry = METHODS.get(name)
                given = dict(part.partition("=")[::2] for part in options.strip("/").split("/"))
                known = {key: value.rstrip(".") for key, value in given.items() if key in entry.options}
                for key, value in known.items():
                    if entry.options[key].numbers and re.match(r"^-?[\d.]", value):
                        entry.options[key].checked(value, name)
                        tried += 1
    assert tried > 30, tried


def test_nested_methods_are_bounded() -> None:
    assert based_on("ada", "pyramidkv/beta=10/score=snapkv/window=8").layers != based_on("ada", "snapkv").layers
    for text in ("pyramidkv/score=" * 2000 + "h2o", "ada/score=" * 9 + "h2o", "h2o/sinks=" + "9" * 5000):
        with pytest.raises(OptionError, match="at most 4,000 characters and 8 methods"):
            based_on("ada", text)
    for text in ("h2o/recent=1180591620717411303424", "snapkv/kernel=-1", "h2o/sinks=16777217"):
        with pytest.raises(OptionError, match="must be"):
            based_on("ada", text)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fastgen", {"special": "99999999999"}),
        ("fastgen", {"punctuation": "1;" * 5000 + "1"}),
        ("kvzip", {"ask": "9" * 5000}),
        ("kvzip", {"ask": f"{2**40};1"}),
        ("layer_table", {"table": "1e308;1e308"}),
        ("layer_table", {"table": "1;" * 2000 + "1"}),
        ("layer_table", {"table": "nan;1"}),
    ],
)
def test_numbers_in_texts_are_bounded(method: str, options: dict[str, str]) -> None:
    with pytest.raises(OptionError) as found:
        METHODS.get(method)(**options)
    assert len(str(found.value)) < 300


@pytest.mark.parametrize(
    "text", [2**70, f"{2**31}", f"{2**61}b", "9" * 400, f"20%, at least {2**40}", 1e308, "1e5%", 0]
)
def test_budgets_have_ranges(text: object) -> None:
    with pytest.raises(BudgetError) as found:
        Budget.parse(text)  # type: ignore[arg-type]
    assert len(str(found.value)) < 250


def test_a_prompt_is_not_cut_into_any_number_of_parts() -> None:
    check_parts("chunk", 256, 256, 10**7)  # as it is by default
    check_parts("chunk", 1, 256, 128)
    with pytest.raises(
        OptionError, match="chunk=1 would read a prompt of 4,000 tokens in 4,000 parts; give at least 32"
    ):
        check_parts("chunk", 1, 256, 4_000)
    with pytest.raises(OptionError, match=r"together=3 would read .* give at least 4"):
        METHODS.get("infllm")(together=3, block=4).check_prompt(500)
    METHODS.get("infllm")(together=4, block=4).check_prompt(500)
    with pytest.raises(OptionError, match="chunk=3 would read"):
        METHODS.get("keydiff")(prefill="chunks", chunk=3).check_prompt(500)
    METHODS.get("keydiff")(chunk=3).check_prompt(500)


def test_ranges_read_as_numbers() -> None:
    assert str(Range(1, MAX_POSITIONS)) == "1 to 16,777,216"
    assert str(Range(0.0, 1.0, above=True)) == "above 0 and at most 1"
    assert not Range(0, 1).holds(math.nan)
    assert str(Range(1, 9, odd=True)) == "odd, 1 to 9"
    assert [n for n in range(-3, 12) if Range(1, 9, odd=True).holds(n)] == [1, 3, 5, 7, 9]
    assert not Range(1, 9, odd=True).holds(10**30)
    assert json.loads("1e999") == math.inf
    assert not POSITIONS.holds(math.inf)
