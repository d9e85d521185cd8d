"""A measured figure in a page is generated from committed rows, or listed with why it is not."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.helpers.package.typed_figures import not_listed, typed_figures

ROOT = Path(__file__).parents[2]
LISTED = tomllib.loads((Path(__file__).parent / "typed_figures.toml").read_text(encoding="utf-8"))
EVERYWHERE = LISTED["everywhere"]["phrases"]
NOT_MEASURED: dict[str, list[str]] = LISTED["not measured"]
PAGES = {
    str(page.relative_to(ROOT)): text
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "<!-- written by" not in (text := page.read_text(encoding="utf-8"))[:100]
}


@pytest.mark.parametrize("page", PAGES)
def test_a_measured_figure_is_generated_or_listed(page: str) -> None:
    found = not_listed(PAGES[page], [*EVERYWHERE, *NOT_MEASURED.get(page, [])])
    shown = [f"{one.text!r} in line {PAGES[page].count(chr(10), 0, one.begin) + 1}" for one in found]
    assert not shown, (
        f"take these from committed rows (<!-- file path .1f -->0<!-- / -->, see CONTRIBUTING.md), "
        f"or list what is not measured in tests/package/typed_figures.toml: {', '.join(shown)}"
    )


def test_listed_phrases_stand_in_their_pages() -> None:
    gone = [(page, one) for page, phrases in NOT_MEASURED.items() for one in phrases if one not in PAGES[page]]
    assert not gone, "remove these from tests/package/typed_figures.toml"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it took 2.5 times as long", ["2.5 times"]),
        ("3 to 4 % and 12 ms; 1,024 tokens", ["3 to 4 %", "12 ms"]),
        ("reads 1.15 GB/s, 20.7 tokens a second, .02 nats", ["1.15 GB/s", "20.7 tokens a second", ".02 nats"]),
        ("KL .0096 ± .0010", [".0096 ± .0010"]),
        ("`20 %` and ``3 s`` and <!-- load s .1f -->2.5<!-- / --> times [2 %](a-3%.md)", ["2 %"]),
        ("finds 18 of 20 and 3 of the 4 facts", ["18 of 20", "3 of the 4"]),
        ("a mean of .64; 5 or 1,024 tokens, file-1.2.txt, page 3.", [".64"]),
        ("<!-- table -->\n| 3 % |\n<!-- /table -->\n```\n4 s\n```\n", []),
        ("| a | 0.95 | 3 (1 to 5) | **x** 2 |", ["0.95", "3 (1 to 5)"]),
    ],
)
def test_typed_figures_are_seen(text: str, found: list[str]) -> None:
    assert [one.text for one in typed_figures(text)] == found


def test_a_phrase_excuses_what_stands_in_it_alone() -> None:
    page = "a budget of 20 % loses 3.5 %"
    assert [one.text for one in not_listed(page, ["a budget of 20 %"])] == ["3.5 %"]
    assert not not_listed(page, ["a budget of 20 %", "loses 3.5 %"])
