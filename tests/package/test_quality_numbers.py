"""The numbers of docs/explanation/quality.md are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from millpond.evals.harness.results import read_rows
from millpond.evals.report.claim_results import ALL, ClaimResult, read_findings

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "explanation" / "quality.md").read_text(encoding="utf-8")
FLAT = " ".join(PAGE.split())
LEADERS = {protocol: read_rows(RESULTS / "quality" / protocol) for protocol in ("aware", "agnostic")}
FINDINGS = read_findings(RESULTS / "quality" / "orderings.json")
FACTS: dict[str, Any] = json.loads((RESULTS / "fact-layer.json").read_text())


def table_under(words: str) -> dict[str, list[str]]:
    """The rows of the first table behind some words, by their first cell."""
    lines = PAGE[PAGE.index(words) :].splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("|"))
    rows = [line.strip("| ").split(" | ") for line in lines[begin + 2 :]]
    found = {}
    for row in rows:
        if len(row) < 2:
            break
        found[row[0]] = row[1:]
    return found


def average(method: str, protocol: str, peer: str = "millpond") -> float:
    scores = [row.score for row in LEADERS[protocol] if row.method == method and row.peer.startswith(peer)]
    assert len(scores) == 10
    return sum(scores) / 10


def pair(first: str, second: str, protocol: str, budget: str = ALL) -> ClaimResult:
    wanted = first, second, "millpond", protocol, budget
    (found,) = (one for one in FINDINGS if (one.first, one.second, one.peer, one.protocol, one.budget) == wanted)
    return found


def test_every_score_of_three_places_is_in_the_results() -> None:
    known = {0.0, 1.0}
    for protocol, rows in LEADERS.items():
        known |= {round(value, 3) for row in rows for value in (row.score, row.low, row.high)}
        known |= {round(average(row.method, protocol, row.peer), 3) for row in rows}
    known |= {round(row[key], 3) for one in FACTS["found"] for row in one["forced"] for key in ("mean", "low", "high")}
    said = {float(number) for number in re.findall(r"(?<![\d.])[01]\.\d{3}(?!\d)", PAGE)}
    assert said - known == set()


PARTS = {
    "`full`": ("full", "auto"),
    "`full`, int4": ("full", "int4"),
    "`h2o`: both halves": ("h2o", "auto"),
    "`h2o`, int4": ("h2o", "int4"),
    "average per query (`average=true`)": ("h2o:average=true", "auto"),
    "forgetting, by half in 69 tokens (`decay=0.99`)": ("h2o:decay=0.99", "auto"),
    "forgetting, by half in 7 tokens (`decay=0.9`)": ("h2o:decay=0.9", "auto"),
    "local statistics (`prefill=greedy`)": ("h2o:prefill=greedy", "auto"),
    "heavy only (`recent=0:sinks=0`)": ("h2o:recent=0:sinks=0", "auto"),
    "recent only (`window`)": ("window", "auto"),
    "the heaviest masked (`no_heavy`)": ("no_heavy", "auto"),
    "`window` and its first four": ("window:sinks=4", "auto"),
}
TASKS = ("recall", "niah_multivalue", "tracking", "copy", "frequent_words")


def test_the_table_of_parts_is_that_of_the_results() -> None:
    rows = read_rows(RESULTS / "h2o-parts")
    shown = table_under("## H2O's parts")
    assert PARTS.keys() <= shown.keys()
    for label, (method, codec) in PARTS.items():
        own = {row.task.partition(":")[0]: row for row in rows if (row.method, row.codec) == (method, codec)}
        assert all(abs(float(cell) - own[task].score) <= 0.0051 for cell, task in zip(shown[label], TASKS, strict=True))


def test_the_table_of_facts_is_that_of_the_results() -> None:
    shown = table_under("## Why H2O misses single facts")
    for place, study in enumerate(FACTS["found"]):
        forced = {row["stays in"]: row for row in study["forced"]}
        for layer in study["layers"]:
            cells = shown[str(layer["layer"])][4 * place : 4 * place + 4]
            assert cells == [
                f"{100 * layer['later attention']:.1f} %",
                f"{100 * layer['below'][1]:.0f} %",
                score(layer["kept"]),
                score(forced[f"layer {layer['layer']}"]),
            ]
        assert said(re.escape(f"{score(forced['none'])} {study['protocol']}"))


def test_one_layer_decides_whether_a_fact_is_told() -> None:
    for study in FACTS["found"]:
        forced = {row["stays in"]: row for row in study["forced"]}
        assert forced["layer 1"]["mean"] == forced["all layers"]["mean"] == 1.0
        assert forced["layer 1"]["more"]["low"] > 0.3
        rest = [forced[name]["mean"] for name in forced if name not in ("layer 1", "all layers")]
        assert set(rest) == {forced["none"]["mean"]}
        more = forced["layer 1"]["more"]
        low, high = (re.escape(f"{100 * more[key]:+.0f}") for key in ("low", "high"))
        assert said(rf"\+{100 * more['mean']:.0f} (points )?\({low} to {high}")
        others = [layer["later attention"] for layer in study["layers"] if layer["layer"] != 1]
        assert max(others) < 0.01 < 0.2 < study["layers"][1]["later attention"]
        below = study["layers"][1]["below"][1]
        assert (below < 0.5) == (study["protocol"] == "agnostic")
        assert said(rf"larger than (those of )?{100 * below:.0f} %")


def score(row: dict[str, float]) -> str:
    return f"{row['mean']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def losses(folder: str, place: int) -> dict[str, float]:
    """Percent by which a method's perplexity is above the full cache's, on the first or the second length."""
    rows = [row for row in read_rows(RESULTS / "quality" / folder) if ("3584" in row.task) == bool(place)]
    full = next(row.score for row in rows if row.method == "full")
    return {row.method: 100 * (row.score / full - 1) for row in rows}


@pytest.mark.parametrize("place", [0, 1])
def test_the_table_of_texts_is_that_of_the_results(place: int) -> None:
    found = losses("text-long", place)
    names = {"`ada`": "ada:score=snapkv/kernel=7", "`snapkv`": "snapkv:kernel=7"}
    for label, cells in table_under("`pond-text-long` is").items():
        if label.startswith("`"):
            loss = found[names.get(label, label[1:-1])]
            assert float(cells[place].removesuffix(" %")) == pytest.approx(loss, abs=0.051)


def test_the_sentences_about_the_short_text_are_those_of_the_results() -> None:
    found = losses("text", 0)
    order = ("ada:score=snapkv/kernel=7", "streaming", "snapkv:kernel=7", "window", "h2o")
    number = r"([\d.]+)"
    pattern = rf"loses {number} %, streaming {number}, SnapKV {number}, the window {number}, H2O {number}\."
    shown = re.search(pattern, FLAT)
    assert shown
    assert [float(number) for number in shown.groups()] == pytest.approx([found[name] for name in order], abs=0.051)
    assert said(rf"\(`recent=0.8`\) it loses {found['h2o:recent=0.8']:.1f} %")


def test_averages_on_the_leaderboard_are_those_of_the_results() -> None:
    h2o, window, random, streaming = (average(name, "aware") for name in ("h2o", "window", "random", "streaming"))
    assert said(
        rf"has {h2o:.3f} on average where the window has {window:.3f}, random entries {random:.3f} and streaming "
        rf"{streaming:.3f} \(aware\)"
    )
    aware, agnostic = (average("h2o:decay=0.9", protocol) for protocol in LEADERS)
    assert said(rf"On average it has {aware:.3f} \(aware\), {agnostic:.3f} \(agnostic\)")


@pytest.mark.parametrize(
    ("first", "second", "protocol", "text"),
    [
        ("h2o", "window", "aware", r"ahead of the window by {mean} points over all budgets \({low} to {high};"),
        ("h2o", "window", "agnostic", r"ahead of the window by {mean} points \({low} to {high}\)"),
        ("h2o", "random:recent=0.5", "aware", r"no difference is seen: \+{mean} \({low} to {high};"),
        ("h2o", "random:recent=0.5", "agnostic", r"not seen to differ from chance \(\+{mean}, {low} to {high}\)"),
        ("h2o:decay=0.9", "h2o", "aware", r"of the sum by {mean} points over all budgets \({low} to {high}, aware;"),
        ("h2o:decay=0.9", "window", "aware", r"of the window by {mean} \({low} to {high}; agnostic"),
    ],
)
def test_who_is_ahead_is_said_by_pairs(first: str, second: str, protocol: str, text: str) -> None:
    found = pair(first, second, protocol)
    low, high = (re.escape(f"{100 * value:+.0f}") for value in (found.low, found.high))
    assert said(text.format(mean=f"{100 * found.mean:.0f}", low=low, high=high))
    unseen = "no difference" in text or "not seen" in text
    assert (found.difference.verdict == "no difference seen") == unseen


def said(pattern: str) -> bool:
    return re.search(pattern, FLAT) is not None
