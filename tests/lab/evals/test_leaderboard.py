"""The leaderboard against tables worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.errors import DataError
from millpond_lab.evals.harness.summary import read_notes, read_rows, unite
from millpond_lab.evals.report.leaderboard import render
from millpond_lab.markdown import one_per_line
from tests.helpers.evals.scored import row, save

ROWS = [
    row("full", "recall", 0.8),
    row("full", "niah:length=64", 1.0),
    row("window", "recall", 0.2),
    row("window", "niah:length=64", 0.3),
    row("h2o", "recall", 0.6),
    row("h2o", "niah:length=64", 0.9),
]


def table(page: str, budget: str = "20%") -> list[list[str]]:
    """The cells of the table under the heading of a budget."""
    part = page.split(f"budget {budget}\n")[1].split("\n#")[0]
    return [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|") and "---" not in line]


def test_a_table_is_sorted_and_counted() -> None:
    heads, *body = table(render(ROWS))
    assert heads == ["method", "recall", "niah length=64", "average", "of full", "KV bytes", "bytes of full"]
    assert body == [
        ["*`full`*", "0.800 (0.780 to 0.820)", "1.000 (0.980 to 1.020)", "0.900", "100.0%", "1,000", "100.0%"],
        ["`h2o`", "**0.600** (0.580 to 0.620)", "**0.900** (0.880 to 0.920)", "0.750", "82.5%", "200", "20.0%"],
        ["`window`", "0.200 (0.180 to 0.220)", "0.300 (0.280 to 0.320)", "0.250", "27.5%", "200", "20.0%"],
    ]
    assert "200 questions a task, seed 7." in render(ROWS)
    assert "whether one candidate is ahead of another is said by pairs" in render(ROWS)


def test_a_sentence_of_the_page_is_a_line() -> None:
    page = render(ROWS, [{"command": "millpond eval", "hardware": "a CPU"}])
    assert one_per_line(page) == page
    assert not [line for line in page.splitlines() if ". **" in line and not line.startswith("|")]


def test_what_reads_the_same_is_bold_together_and_references_never() -> None:
    rows = [row("full", "t", 0.9), row("oracle", "t", 0.9), row("h2o", "t", 0.7001), row("ada", "t", 0.7004)]
    body = {cells[0]: cells[1] for cells in table(render(rows))[1:]}
    assert [name for name, score in body.items() if "**" in score] == ["`ada`", "`h2o`"]
    assert "*`oracle`*" in body


def test_perplexity_counts_in_the_share_not_in_the_average() -> None:
    ppl = {"better": "lower"}
    rows = [
        row("full", "t", 1.0),
        row("full", "text", 4.0, **ppl),
        row("h2o", "t", 0.5),
        row("h2o", "text", 5.0, **ppl),
    ]
    rows += [row("ada", "t", 0.5), row("ada", "text", 4.0, **ppl)]
    heads, *body = table(render(rows))
    by_name = {cells[0]: dict(zip(heads, cells, strict=True)) for cells in body}
    assert by_name["`h2o`"]["average"] == "0.500"
    assert by_name["`h2o`"]["of full"] == "65.0%"
    assert by_name["`ada`"]["text"] == "**4.000 ppl** (3.980 to 4.020)"
    assert list(by_name) == ["*`full`*", "`ada`", "`h2o`"]
    assert "lower is better" in render(rows)


def test_what_is_missing_is_not_averaged_and_stands_last() -> None:
    heads, *body = table(render([*ROWS, row("ada", "recall", 0.99)]))
    last = dict(zip(heads, body[-1], strict=True))
    assert (last["method"], last["niah length=64"], last["average"], last["of full"]) == ("`ada`", "–", "–", "–")
    failed = render([*ROWS, row("ada", "recall", math.nan, failures=200), row("ada", "niah:length=64", 0.1)])
    assert "all failed" in failed
    assert "200 failed and count as wrong" in failed


def test_peers_that_only_mask_are_marked() -> None:
    rows = [*ROWS, row("snapkv", "recall", 0.7, peer="kvpress 0.5.5", masks_only=True)]
    page = render(rows)
    assert "| `snapkv` (kvpress 0.5.5) † |" in page
    assert "† hides entries" in page
    assert "†" not in render(ROWS)


def test_a_table_for_each_model_protocol_and_budget() -> None:
    rows = [*ROWS, row("h2o", "recall", 0.5, budget="512"), row("h2o", "recall", 0.4, budget="5%")]
    rows += [row("h2o", "recall", 0.3, protocol="agnostic"), row("h2o", "recall", 0.3, model="other")]
    heads = [line for line in render(rows).splitlines() if line.startswith("##")]
    assert heads == [
        "## m",
        "### Context and question are compressed together (aware), budget 5%",
        "### Context and question are compressed together (aware), budget 20%",
        "### Context and question are compressed together (aware), budget 512",
        "### The context is compressed before any question is seen (agnostic), budget 20%",
        "## other",
        "### Context and question are compressed together (aware), budget 20%",
    ]
    assert [cells[0] for cells in table(render(rows), "5%")] == ["method", "*`full`*", "`h2o`"]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["leaderboard", *map(str, arguments)])


def test_the_command_writes_and_checks(tmp_path: Path) -> None:
    one = save(tmp_path / "one", ROWS[:4], notes=[{"command": "millpond eval --tasks recall", "hardware": "2 cores"}])
    two = save(tmp_path / "two", ROWS[4:])
    page = tmp_path / "docs" / "leaderboard.md"
    assert call(one, two, "--out", page, "--check").exit_code == 1
    assert call(one, two, "--out", page).exit_code == 0
    assert page.read_text() == render(ROWS, read_notes(one))
    assert "* `millpond eval --tasks recall`; 2 cores" in page.read_text()
    assert call(one, two / "summary.json", "--out", page, "--check").exit_code == 0
    save(two, [*ROWS[4:5], row("h2o", "niah:length=64", 0.91)])
    done = call(one, two, "--out", page, "--check")
    assert done.exit_code == 1
    assert "is not what the results say" in done.stderr


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    done = call(tmp_path)
    assert done.exit_code == 2
    assert "holds no summary.json" in done.stderr
    file = tmp_path / "summary.json"
    for content, sentence in [
        ("{", "cannot be read"),
        ("{}", "not a list"),
        ("[1]", "row 1 has"),
        ('[{"a": 1}]', "row 1"),
    ]:
        file.write_text(content)
        with pytest.raises(DataError, match=sentence):
            read_rows(tmp_path)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    save(tmp_path, [*ROWS, row("ada", "recall", math.nan, low=math.nan, high=math.nan)])
    *same, undefined = read_rows(tmp_path)
    assert same == ROWS
    assert math.isnan(undefined.score)
    assert math.isnan(undefined.low)
    data = json.loads((tmp_path / "summary.json").read_text())
    data[0].pop("masks_only")
    (tmp_path / "summary.json").write_text(json.dumps(data))
    assert read_rows(tmp_path)[0] == ROWS[0]


def test_the_same_cell_may_come_twice_but_not_with_two_scores() -> None:
    assert unite([*ROWS, *ROWS]) == ROWS
    with pytest.raises(DataError, match=r"two results for h2o 20% on recall"):
        unite([*ROWS, row("h2o", "recall", 0.61)])


def test_methods_with_trained_networks_are_named() -> None:
    assert "trained for the model" not in render(ROWS)
    page = render([*ROWS, row("locret:heads=a.safetensors", "recall", 0.9), row("attention_gate", "recall", 0.9)])
    assert "`attention_gate`, `locret`: by networks that were trained for the model" in page
