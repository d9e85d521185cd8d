"""Pictures: what is drawn is what the numbers say; files come and are readable."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.errors import DataError
from millpond.inspector.palette import METHODS, colour_of, marker_of
from millpond.inspector.trace import Change, HeadTrace, Trace
from millpond_lab.evals.harness.summary import cell_of
from millpond_lab.evals.report.curves import pareto_front
from millpond_lab.evals.report.leaderboard import render
from millpond_lab.evals.report.plots.budgets import budget_map, budgets_of_trace
from millpond_lab.evals.report.plots.folder import draw_all
from millpond_lab.evals.report.plots.needle import NeedlePanel, grid, needle, panels_of
from millpond_lab.evals.report.plots.pareto import pareto
from millpond_lab.evals.report.plots.quality import quality
from tests.helpers.evals.scored import record, row, save

FULL, H2O, WINDOW = row("full", "t", 0.9), row("h2o", "t", 0.8), row("window", "t", 0.3)


def line(axis: Axes, colour: str) -> tuple[list[float], list[float]]:
    """Points of the line of a colour."""
    for container in axis.containers:
        assert isinstance(container, ErrorbarContainer)
        drawn = container.lines[0]
        if to_hex(drawn.get_color()) == colour:
            return list(drawn.get_xdata()), list(drawn.get_ydata())
    raise AssertionError(f"no line is {colour}")


def test_quality_draws_scores_over_bytes() -> None:
    more = row("h2o", "t", 0.85, budget="40%", kv_bytes=400.0)
    ppl = row("h2o", "text", 4.0, better="lower")
    figure = quality([FULL, more, H2O, WINDOW, ppl])
    first, second = figure.axes
    assert line(first, colour_of("h2o")) == ([200.0, 400.0], [0.8, 0.85])
    assert line(first, colour_of("window")) == ([200.0], [0.3])
    assert any(list(drawn.get_ydata()) == [0.9, 0.9] for drawn in first.lines)  # the full cache, all the way through
    assert line(second, colour_of("h2o"))[1] == [4.0]
    assert "lower is better" in second.get_title(loc="left")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["full", "h2o", "window"]


def test_pictures_and_the_board_say_how_many_tokens_were_scored() -> None:
    fed = [row(name, "text", 4.0, better="lower", scored_tokens=5120) for name in ("full", "h2o")]
    for made in (quality([*fed, FULL, H2O]), pareto(fed)):
        assert any("5,120 tokens scored" in text.get_text() for text in made.texts)
    assert not any("tokens scored" in text.get_text() for text in quality([FULL, H2O]).texts)
    assert "200 questions a task (5,120 tokens scored), seed 7." in render(fed)


def test_quality_leaves_out_what_has_no_score() -> None:
    with pytest.raises(DataError, match="no quality to draw"):
        quality([row("h2o", "t", float("nan"))])


def test_the_front_is_what_nothing_beats_in_both() -> None:
    cheap, good, waste, tie = (
        row("h2o", "t", s, kv_bytes=b) for s, b in ((0.5, 10.0), (0.9, 20.0), (0.9, 30.0), (0.4, 10.0))
    )
    assert pareto_front([waste, tie, good, cheap]) == [cheap, good]
    worse, better = (row("h2o", "t", s, better="lower", kv_bytes=b) for s, b in ((8.0, 10.0), (4.0, 20.0)))
    assert pareto_front([better, worse]) == [worse, better]
    assert pareto_front([row("h2o", "t", 3.0, better="lower", kv_bytes=5.0), better]) == [
        row("h2o", "t", 3.0, better="lower", kv_bytes=5.0)
    ]


def test_pareto_draws_every_setting_and_names_those_on_the_front() -> None:
    rows = [
        row("full", "t", 1.0, codec="bf16", budget="", kv_bytes=1000.0, full_kv_bytes=1000.0),
        row("full", "t", 1.0, codec="int4", budget="", kv_bytes=250.0, full_kv_bytes=1000.0),
        row("ada", "t", 0.8, codec="int4", kv_bytes=50.0, full_kv_bytes=1000.0),
        row("ada", "t", 0.7, codec="int2", kv_bytes=60.0, full_kv_bytes=1000.0),
    ]
    figure = pareto(rows)
    (axis,) = figure.axes
    points = {
        (float(drawn.get_xdata()[0]), float(drawn.get_ydata()[0]))
        for drawn in axis.lines
        if len(drawn.get_xdata()) == 1
    }
    assert points == {(1.0, 1.0), (0.25, 1.0), (0.05, 0.8), (0.06, 0.7)}
    assert [text.get_text() for text in axis.texts] == ["int4", "int4"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["full", "ada 20%"]
    with pytest.raises(DataError, match="nothing to set"):
        pareto([row("h2o", "t", float("nan"))])


def test_a_task_in_several_codecs_is_drawn_as_a_front(tmp_path: Path) -> None:
    rows = [FULL, H2O, row("h2o", "u", 0.5, codec="int4"), row("h2o", "u", 0.6, codec="bf16", kv_bytes=800.0)]
    names = [path.name for path in draw_all(save(tmp_path / "run", rows), tmp_path / "out", "svg")]
    assert names == ["quality-m-aware-7.svg", "pareto-m-aware-7.svg"]


def test_a_peer_that_masks_is_hollow() -> None:
    peer = row("h2o", "t", 0.7, peer="kvpress 0.5.5", masks_only=True)
    figure = quality([FULL, H2O, peer])
    ours, theirs = [c.lines[0] for c in figure.axes[0].containers if isinstance(c, ErrorbarContainer)]
    assert to_hex(ours.get_markerfacecolor()) == colour_of("h2o")
    assert to_hex(theirs.get_markerfacecolor()) == "#ffffff"
    assert ours.get_marker() != theirs.get_marker()


def test_colours_are_told_apart_and_stay() -> None:
    assert len(set(METHODS.values())) == len(METHODS)
    assert colour_of("h2o:recent=0.1") == METHODS["h2o"]
    assert colour_of("someone_elses") == colour_of("someone_elses:a=1")
    assert marker_of("h2o") == marker_of("ada") == "o"
    assert "o" not in (marker_of("h2o:recent=0.1"), marker_of("h2o", "kvpress 0.5.5"), marker_of("keydiff"))
    board = [*METHODS, "keydiff", "compactor", "pyramidkv", "criticalkv", "chunkkv", "expected_attention"]
    assert len({(colour_of(name), marker_of(name)) for name in board}) == len(board)


def test_the_heat_map_averages_by_depth_and_length() -> None:
    asked = [record(H2O, 0.0, 512, 1.0), record(H2O, 0.0, 512, 0.5), record(H2O, 1.0, 64, 0.25)]
    values = grid(NeedlePanel("h2o", asked), [0.0, 1.0], [64, 512])
    assert np.array_equal(values, [[np.nan, 0.75], [0.25, np.nan]], equal_nan=True)
    figure = needle([NeedlePanel("h2o 20%", asked)], "m")
    assert np.allclose(figure.axes[0].images[0].get_array().filled(-1), [[-1, 0.75], [0.25, -1]])
    assert figure.axes[0].get_title(loc="left") == "h2o 20%   0.50"


def test_lengths_of_a_task_share_a_heat_map() -> None:
    short, long = row("h2o", "niah:length=64", 1.0), row("h2o", "niah:length=512", 1.0)
    found = panels_of(
        [cell_of(short), cell_of(long), cell_of(FULL)], [record(short, 0.5, 64, 1.0), record(long, 0.5, 512, 0.0)]
    )
    assert list(found) == [("m", "niah", "aware")]
    (panel,) = found["m", "niah", "aware"]
    assert (panel.name, len(panel.records)) == ("h2o 20%", 2)
    with pytest.raises(DataError, match="no heat map"):
        needle([], "m")


def trace() -> Trace:
    heads = tuple(tuple(HeadTrace(tuple(range(n)), (Change((0,), (9,)),)) for n in layer) for layer in ((3, 5), (4, 4)))
    return Trace({"method": "ada", "budget": "4"}, tuple("a" * 10), 9, heads, (0,), (1, 1), (2, 2))


def test_the_budget_map_counts_entries() -> None:
    assert budgets_of_trace(trace()) == budgets_of_trace(trace(), 1) == [[3, 5], [4, 4]]
    figure = budget_map([[3, 5], [4, 4]], "ada", 9)
    assert figure.axes[0].images[0].get_array().tolist() == [[3, 5], [4, 4]]
    assert [text.get_text() for text in figure.axes[0].texts] == ["3", "5", "4", "4"]
    with pytest.raises(DataError, match="no map to draw"):
        budget_map([], "x", 9)


@pytest.mark.parametrize(("suffix", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_command_draws_all_that_there_is(tmp_path: Path, suffix: str, begin: bytes) -> None:
    save(tmp_path, [FULL, H2O], [record(H2O, d, n, d) for d in (0.0, 1.0) for n in (64, 512)])
    trace().write(tmp_path / "one.trace.json")
    done = CliRunner().invoke(app, ["plot", str(tmp_path), "--format", suffix, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    names = ["budgets-one", "needle-m-t-aware", "quality-m-aware-7"]
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == names
    for name in names:
        assert (tmp_path / "out" / f"{name}.{suffix}").read_bytes().startswith(begin)
        assert f"{name}.{suffix}" in done.output


def test_only_the_methods_asked_for_are_drawn(tmp_path: Path) -> None:
    save(tmp_path, [FULL, H2O, row("window", "t", 0.1)])
    done = CliRunner().invoke(app, ["plot", str(tmp_path), "--format", "svg", "--method", "full,h2o"])
    assert done.exit_code == 0, done.output
    drawn = (tmp_path / "plots" / "quality-m-aware-7.svg").read_text()
    assert not re.search(r' (?:d|x|y)="[^"]*\.\d{3}', drawn), "places have two decimals"
    assert "h2o" in drawn
    assert "window" not in drawn
    done = CliRunner().invoke(app, ["plot", str(tmp_path), "--method", "windov"])
    assert done.exit_code == 2
    assert "did you mean 'window'" in done.stderr


def test_the_command_refuses_what_holds_nothing(tmp_path: Path) -> None:
    for folder, sentence in ((tmp_path, "holds neither"), (tmp_path / "none", "is no folder")):
        done = CliRunner().invoke(app, ["plot", str(folder)])
        assert done.exit_code == 2
        assert sentence in done.stderr
    save(tmp_path, [H2O])
    (tmp_path / "samples.jsonl").write_text("{}\n")
    done = CliRunner().invoke(app, ["plot", str(tmp_path)])
    assert done.exit_code == 2
    assert "line 1 is not a record" in done.stderr
