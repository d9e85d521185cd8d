"""Curves of methods: numbers worked out by hand, the section of a page, the picture."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D

from millpond.errors import DataError
from millpond.inspector.palette import colour_of
from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.report.curves import CurvePanel, curves_of, panels, quality_section
from millpond_lab.evals.report.kvpress_equivalents import PRESSES
from millpond_lab.evals.report.plots.curve import curve_picture, digest, is_current
from millpond_lab.evals.report.plots.style import write
from tests.helpers.evals.scored import row

KVPRESS = {"peer": "kvpress 0.5.5", "kv_bytes": 1000.0, "masks_only": True}


def sample_rows(protocol: str = "aware") -> list[SummaryRow]:
    """Two tasks, two budgets; the second budget comes first."""
    rows = [row("full", "a", 1.0), row("full", "b", 0.5)]
    for name, shares in {"ada": (0.9, 0.6), "window": (0.5, 0.2), "oracle": (1.0, 0.8)}.items():
        for budget, share in zip(("20%", "5%"), shares, strict=True):
            rows += [row(name, "a", share, budget), row(name, "b", share / 2, budget)]
    press = PRESSES["ada"]
    rows += [row(press, task, 0.4, budget, **KVPRESS) for task in "ab" for budget in ("20%", "5%")]
    return [SummaryRow(**{**{name: getattr(r, name) for name in r.__slots__}, "protocol": protocol}) for r in rows]


def test_a_point_is_the_mean_share_of_full() -> None:
    (curve,) = [c for c in curves_of(sample_rows()) if c.method == "ada"]
    assert [point.budget for point in curve.points] == ["5%", "20%"]
    first = curve.points[0]
    assert first.share == pytest.approx(0.6)
    # half-widths: 0.02 of 1.0 and 0.02 of 0.5, in squares, over two tasks
    half = math.hypot(0.02, 0.04) / 2
    assert (first.low, first.high) == (pytest.approx(0.6 - half), pytest.approx(0.6 + half))
    assert (first.held, first.n, first.failures, first.masks_only) == (0.2, 400, 0, False)


def test_a_budget_with_a_task_missing_is_left_out() -> None:
    rows = [row("full", "a", 1.0), row("full", "b", 1.0), row("ada", "a", 0.9), row("ada", "a", 0.9, "5%")]
    rows += [row("ada", "b", 0.9), row("h2o", "a", 0.5)]
    assert [(c.method, [p.budget for p in c.points]) for c in curves_of(rows)] == [("ada", ["20%"])]


def test_perplexity_and_what_has_no_score_are_left_out() -> None:
    rows = [row("full", "a", 1.0), row("ada", "a", 0.5), row("ada", "a", math.nan, "5%")]
    rows += [row("full", "text", 3.0, better="lower"), row("ada", "text", 4.0, better="lower")]
    (curve,) = curves_of(rows)
    assert [(p.budget, p.share) for p in curve.points] == [("20%", 0.5)]


def test_rows_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(DataError, match="one model and seed"):
        curves_of([row("full", "a", 1.0), row("ada", "a", 1.0, seed=8)])
    with pytest.raises(DataError, match="no row of the full cache for ada"):
        curves_of([row("ada", "a", 1.0)])
    assert curves_of([]) == []


def test_a_page_shows_its_method_its_press_and_references() -> None:
    found = panels(curves_of([*sample_rows(), *sample_rows("agnostic")]), "ada")
    assert list(found) == ["aware", "agnostic"]
    panel = found["aware"]
    assert panel.own.method == "ada"
    assert [curve.method for curve in panel.beside] == [PRESSES["ada"], "window", "oracle"]
    assert panels(curves_of(sample_rows()), "snapkv") == {}
    window = panels(curves_of(sample_rows()), "window")["aware"]
    assert window.window is None
    assert window.press is None


def test_a_method_without_results_of_its_defaults_shows_the_options_it_has() -> None:
    rows = [row("full", "a", 1.0), row("layer_table:table=3;1", "a", 0.5), row("layer_table:table=9;1", "a", 0.4)]
    assert panels(curves_of(rows), "layer_table")["aware"].own.method == "layer_table:table=3;1"
    rows = [row("full", "a", 1.0), row("ada:score=h2o", "a", 0.5), row("ada", "a", 0.4)]
    assert panels(curves_of(rows), "ada")["aware"].own.method == "ada"


def section(rows: list[SummaryRow], name: str = "ada") -> str:
    return quality_section(panels(curves_of(rows), name), rows, "x.svg")


def test_the_section_has_every_number() -> None:
    text = section(sample_rows())
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    press = f"`{PRESSES['ada']}` (kvpress 0.5.5)"
    assert lines[0] == ["protocol", "budget", "`ada`", "bytes of full", press, "bytes of full", "window", "oracle"]
    assert lines[2] == [
        "aware",
        "5%",
        "60.0% (57.8% to 62.2%)",
        "20.0%",
        "60.0% (57.8% to 62.2%)",
        "100.0% †",
        "20.0%",
        "80.0%",
    ]
    assert [line[:2] for line in lines[2:]] == [["aware", "5%"], ["aware", "20%"]]
    assert "![Quality of ada over budgets](x.svg)" in text
    assert "`m`: the mean over `a`, `b`, 200 questions each, seed 7" in text
    assert "† hides entries" in text
    assert "failed" not in text


def test_a_column_without_numbers_is_no_column() -> None:
    rows = [row("full", "a", 1.0), row("h2o", "a", 0.5)]
    assert "| protocol | budget | `h2o` | bytes of full |\n" in section(rows, "h2o")
    assert section(rows, "ada") == ""


def test_failures_are_told() -> None:
    rows = [row("full", "a", 1.0), row("h2o", "a", 0.5, "5%", failures=12), row("h2o", "a", 0.5)]
    assert "`h2o` (aware) failed on 12 of 200 at 5%; that counts as wrong." in section(rows, "h2o")


def shown() -> dict[str, CurvePanel]:
    return panels(curves_of([*sample_rows(), *sample_rows("agnostic")]), "ada")


def test_the_picture_draws_the_numbers() -> None:
    figure = curve_picture(shown())
    aware, agnostic = figure.axes
    assert (aware.get_title(loc="left"), agnostic.get_title(loc="left")) == ("ada, aware", "ada, agnostic")
    lines = {line.get_label(): line for line in aware.lines if isinstance(line, Line2D)}
    assert list(lines["ada"].get_xdata()) == [0.05, 0.2]
    assert list(lines["ada"].get_ydata()) == pytest.approx([0.6, 0.9])
    assert list(lines["window"].get_ydata()) == pytest.approx([0.2, 0.5])
    theirs = lines["AdaKVPress(SnapKVPress) (kvpress 0.5.5)"]
    assert to_hex(str(theirs.get_color())) == colour_of("ada")
    assert theirs.get_markerfacecolor() == "#ffffff"
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["ada", "AdaKVPress(SnapKVPress) (kvpress 0.5.5)", "window", "oracle", "full"]


def test_a_picture_knows_whether_it_is_current(tmp_path: Path) -> None:
    mark = digest(shown())
    path = write(curve_picture(shown()), tmp_path / "ada.svg", about=mark)
    assert is_current(path, mark)
    assert write(curve_picture(shown()), tmp_path / "again.svg", about=mark).read_bytes() == path.read_bytes()
    other = panels(
        curves_of([r if r.method != "ada" else row("ada", r.task, 0.1, r.budget) for r in sample_rows()]), "ada"
    )
    assert not is_current(path, digest(other))
    assert not is_current(tmp_path / "none.svg", mark)
