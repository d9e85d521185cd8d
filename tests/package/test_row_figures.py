"""Figures that marks of hand-written pages take from committed rows."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    {"cell": "h2o", "at": {"budget": "20%", "batch": 4}, "tokens_per_s": 12.0, "kl": [0.5, 0.1]},
    {"cell": "h2o", "at": {"budget": "50%", "batch": 4}, "tokens_per_s": 9.0, "kl": [0.25, 0.1]},
    {"cell": "full", "at": None, "tokens_per_s": 6.0, "kl": [0.0, 0.0], "load, warm": 3},
]


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "docs")
    module = importlib.import_module("generated.row_figures")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    (tmp_path / "load.json").write_text(json.dumps({"rows": ROWS, "seconds": 8, "by": {"a": {"n": 1}, "b": {"n": 3}}}))
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "summary.json").write_text(json.dumps(ROWS))
    module.content.cache_clear()
    yield module
    module.content.cache_clear()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load seconds", 8),
        ("load rows[0].kl[1]", 0.1),
        ("load rows[-1].tokens_per_s", 6),
        ('load rows[cell=h2o,at.budget="20%"].tokens_per_s / rows[cell=full].tokens_per_s', 2),
        ("load rows[at.batch=4,tokens_per_s=9].kl[0]", 0.25),
        ("load rows[at=null].tokens_per_s", 6),
        ("load rows[cell~ul,at=null].tokens_per_s", 6),
        ('load rows[2]."load, warm"', 3),
        ("lines [cell=full].tokens_per_s", 6),
        ("task [cell=full].tokens_per_s + {load}seconds", 14),
        ("load median(rows[*].tokens_per_s)", 9),
        ("load mean(rows[*,cell=h2o].tokens_per_s)", 10.5),
        ("load max(rows[*].tokens_per_s / rows[cell=full].tokens_per_s) - min(1, seconds)", 1),
        ("load count(by[*].n) + sum(by[*].n)", 6),
        ("load 100 * (rows[0].tokens_per_s / rows[1].tokens_per_s - 1)", 100 / 3),
        ("load mean(rows.*.kl.0)", 0.25),
        ("load rows.1.tokens_per_s", 9),
        ("load -seconds + 2 * 3 - 4 / 8", -2.5),
    ],
)
def test_a_figure_is_found(figures: ModuleType, name: str, value: float) -> None:
    assert figures.is_committed(name)
    assert figures.row_figure(name) == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone seconds", "benchmarks/results has no 'gone'"),
        ("load minutes", "no 'minutes' there; rows, seconds, by"),
        ("load seconds.x", "no 'x' there; it is a int"),
        ("load rows[3].kl", r"no \[3\] in a list of 3"),
        ("load seconds[0]", r"no \[0\] in a int"),
        ("load rows[cell=h2o].tokens_per_s", r"2 rows have cell=h2o; one is wanted, or \[\*,cell=h2o\] for all"),
        ("load rows[cell=ada].tokens_per_s", "0 rows have cell=ada"),
        ("load seconds[cell=h2o]", "of a list or an object, not of a int"),
        ("load rows[*].tokens_per_s", "has 3 figures; choose one with median"),
        ("load rows[0].cell", "leads to a str, not to a number"),
        ("load rows[0].at", "leads to a dict of budget, batch, not to a number"),
        ("load rows[*].kl[0] / rows[*,cell=h2o].kl[0]", "3 figures / 2 figures: the lists differ in length"),
        ("load seconds / rows[2].kl[0]", "a division by zero"),
        ("load mean(rows[*,cell=ada].kl[0])", r"mean\(\) of no figures"),
        ("load seconds seconds", "stands 'seconds' where an operator or the end is expected"),
        ("load (seconds", r"stands 'the end' where '\)' is expected"),
        ("load ", "stands 'the end' where a number, a path or a bracket is expected"),
        ("load rows[0", r"stands 'the end' where '\]' is expected"),
        ("load rows[cell]", "where '=' or '~' is expected"),
        ("load rows[cell~o].tokens_per_s", "2 rows have cell~o"),
        ("load rows[0].kl[*][0]", "Markdown takes"),
        ("load __import__('os')", "cannot be read from"),
    ],
)
def test_what_is_wrong_is_said(figures: ModuleType, name: str, message: str) -> None:
    with pytest.raises(figures.FigureError, match=message):
        figures.row_figure(name)


def test_a_mark_goes_on_from_the_row_of_the_one_before(figures: ModuleType) -> None:
    markup = importlib.import_module("generated.markup")
    first = "<!-- load 10*rows[cell=full].tokens_per_s .0f -->60<!-- / -->"
    page = f"{first} and <!-- 2*.kl[0]+.tokens_per_s .0f -->6<!-- / -->"
    page += "<!-- ~ seconds .0f -->8<!-- / -->"
    assert markup.fill_figures(page, {}) == page
    assert markup.fill_figures(page.replace(">6<", ">7<"), {}) == page
    with pytest.raises(SystemExit, match="goes on from a row, and '', the mark before it, has none"):
        markup.fill_figures("<!-- .kl[0] .0f -->6<!-- / -->", {})


def test_a_mark_is_filled_or_refused_by_its_name(figures: ModuleType) -> None:
    markup = importlib.import_module("generated.markup")
    page = "takes <!-- load seconds .1f -->7<!-- / --> s, <!-- own .0f -->3<!-- / --> in all"
    assert markup.fill_figures(page, {"own": 4}) == page.replace("7", "8.0").replace("3", "4")
    with pytest.raises(SystemExit, match="the figure 'load minutes': no 'minutes' there"):
        markup.fill_figures("<!-- load minutes .1f -->7<!-- / -->", {})
    with pytest.raises(SystemExit, match="'2q' is no format of numbers"):
        markup.fill_figures("<!-- load seconds 2q -->7<!-- / -->", {})
    with pytest.raises(SystemExit, match="no figure is named 'lost seconds'"):
        markup.fill_figures("<!-- lost seconds .1f -->7<!-- / -->", {})
