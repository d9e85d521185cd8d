"""Orderings: claims and counterparts measured on made-up runs, and the tables of the page."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millpond.errors import DataError
from millpond_lab.evals.decoding.record import Record, SummaryRow
from millpond_lab.evals.harness.summary import cell_of
from millpond_lab.evals.report.claims import (
    ALL,
    AT_BYTES,
    CLAIMS,
    PEERS,
    TEXT,
    ClaimResult,
    Runs,
    read_findings,
    renewed,
    write_findings,
)
from millpond_lab.evals.report.claims_page import MISSING, UNEQUAL, tables
from millpond_lab.evals.report.kvpress_equivalents import ALIKE, PRESSES, pool
from tests.helpers.evals.scored import row, save

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / "benchmarks" / "results" / "quality" / "orderings.json"


def answers(of: SummaryRow, scores: list[float], depths: list[float] | None = None) -> list[Record]:
    facts: list[dict[str, float]] = [{} for _ in scores] if depths is None else [{"depth": depth} for depth in depths]
    return [
        Record(cell_of(of).key, f"s{i}", 0, "", score, 1.0, 10, 0.2, 200, 1000, facts=fact)
        for i, (score, fact) in enumerate(zip(scores, facts, strict=True))
    ]


def made(folder: Path, candidates: dict[str, list[float]], depths: list[float] | None = None, **other: object) -> Path:
    """A run in which every candidate has these scores at 5 % and at 20 %, on one task."""
    rows, records = [row("full", "t", 1.0)], []
    for name, scores in candidates.items():
        for budget in ("5%", "20%"):
            rows.append(row(name, "t", sum(scores) / len(scores), budget, **other))  # type: ignore[arg-type]
            records += answers(rows[-1], scores, depths)
    return save(folder, rows, records)


def pairs(findings: list[ClaimResult]) -> list[tuple[str, str, str, str]]:
    return [(f.claim, f.first, f.second, f.budget) for f in findings]


def test_a_claim_is_measured_at_each_budget_and_over_all(tmp_path: Path) -> None:
    found = Runs([made(tmp_path, {"h2o": [1, 1, 0.5, 1] * 3, "window": [0.5, 0.5, 0, 0.5] * 3})]).findings()
    assert pairs(found) == [("heavy", "h2o", "window", budget) for budget in ("5%", "20%", "all")]
    for finding in found:
        assert finding.mean == 0.5
        assert 0.2 < finding.low < 0.5 < finding.high + 0.1 < 0.8
        assert (finding.n, finding.tasks, finding.protocol, finding.peer) == (12, ("t",), "aware", "millpond")
        assert (finding.held, finding.other_held) == (0.2, 0.2)
        assert finding.difference.verdict == "holds"


def test_protocols_are_not_mixed(tmp_path: Path) -> None:
    aware = made(tmp_path / "a", {"h2o": [1.0] * 9, "window": [0.0] * 9})
    agnostic = made(tmp_path / "b", {"h2o": [0.0] * 9, "window": [1.0] * 9}, protocol="agnostic")
    found = {f.protocol: f.difference.verdict for f in Runs([aware, agnostic]).findings()}
    assert found == {"aware": "holds", "agnostic": "reversed"}


def test_of_perplexities_the_lower_one_is_ahead(tmp_path: Path) -> None:
    answered = made(tmp_path / "a", {"h2o": [0.0] * 9, "window": [1.0] * 9})
    text = made(tmp_path / "b", {"h2o": [3.5, 3.7], "window": [3.6, 3.8]}, better="lower", seed=8)
    found = {f.protocol: f for f in Runs([answered, text]).findings() if f.budget == "all"}
    assert {name: f.difference.verdict for name, f in found.items()} == {"aware": "reversed", TEXT: "holds"}
    assert found[TEXT].mean == pytest.approx(0.1)


def test_needles_in_the_middle_are_those_whose_facts_lie_there(tmp_path: Path) -> None:
    scores = {"snapkv": [1.0, 1.0, 0.0, 0.0], "streaming": [0.0, 0.0, 1.0, 1.0]}
    run = made(tmp_path / "a", scores, depths=[0.3, 0.7, 0.1, 0.9])
    found = [f for f in Runs([run]).findings() if f.claim == "needles"]
    assert [(f.mean, f.n) for f in found] == [(1.0, 2)] * 3
    unknown = made(tmp_path / "b", scores)
    assert [f for f in Runs([unknown]).findings() if f.claim == "needles"] == []


def test_ours_and_the_press_are_compared(tmp_path: Path) -> None:
    ours = made(tmp_path / "ours", {"ada": [1.0, 0.0, 1.0]})
    theirs = made(
        tmp_path / "theirs", {PRESSES["ada"]: [1.0, 0.0, 1.0]}, peer="kvpress 0.5.5", masks_only=True, kv_bytes=1000.0
    )
    found = Runs([ours, theirs]).findings()
    assert pairs(found) == [(PEERS, "ada", PRESSES["ada"], budget) for budget in ("5%", "20%", "all")]
    assert (found[0].held, found[0].other_held, found[0].masks_only) == (0.2, 1.0, True)
    assert found[0].difference.verdict == "no difference seen"


def test_records_that_are_there_twice_count_once(tmp_path: Path) -> None:
    folder = made(tmp_path, {"h2o": [1.0, 0.0], "window": [0.0, 0.0]})
    before = Runs([folder]).findings()
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8")
    (folder / "samples.jsonl").write_text(lines + lines, encoding="utf-8")
    assert Runs([folder]).findings() == before


def test_a_run_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no samples\.jsonl"):
        Runs([save(tmp_path, [row("h2o", "t", 1.0)])])


def test_findings_are_kept(tmp_path: Path) -> None:
    found = Runs([made(tmp_path, {"h2o": [1, 0.123456789], "window": [0.5, 0]})]).findings()
    write_findings(tmp_path / "o.json", found)
    assert read_findings(tmp_path / "o.json") == [
        replace(f, mean=round(f.mean, 5), low=round(f.low, 5), high=round(f.high, 5)) for f in found
    ]
    assert read_findings(tmp_path / "none.json") == []
    write_findings(tmp_path / "o.json", [])
    assert read_findings(tmp_path / "o.json") == []
    (tmp_path / "o.json").write_text('[{"claim": "heavy"}]', encoding="utf-8")
    with pytest.raises(DataError, match="not a list of findings"):
        read_findings(tmp_path / "o.json")


def finding(claim: str, first: str, second: str, mean: float, half: float = 0.1, **other: object) -> list[ClaimResult]:
    one = ClaimResult(
        claim, first, second, "millpond", "aware", "5%", ("t:length=64",), mean, mean - half, mean + half, 8, 0.2, 0.2
    )
    return [replace(one, budget=budget, **other) for budget in ("20%", "5%", "all")]  # type: ignore[arg-type]


def cells(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|") and "---" not in line]


def test_a_table_says_how_much_and_whether() -> None:
    parts = tables(
        [
            *finding("merge", "d2o", "h2o", 0.25),
            *finding("merge", "d2o", "h2o", -0.05, protocol="agnostic"),
            *finding("merge", "cam", "streaming:positions=absolute", -0.3),
        ]
    )
    heads, *body = cells(parts["merge"])
    assert heads == ["pair", "protocol", "5%", "20%", "all budgets", "verdict"]
    assert body == [
        ["`d2o` over `h2o`", "aware", *["**+25.0** (+15.0 to +35.0)"] * 3, "holds"],
        ["`d2o` over `h2o`", "agnostic", *["-5.0 (-15.0 to +5.0)"] * 3, "no difference seen"],
        ["`cam` over `streaming:positions=absolute`", "aware", *["**-30.0** (-40.0 to -20.0)"] * 3, "reversed"],
    ]
    assert "8 samples of `t length=64`. `kvmerger` also" in parts["merge"]
    assert "`d2o` also shares its budget out over the layers." in parts["merge"]
    heads, *body = cells(parts["summary"])
    assert heads == ["claim", "by", "measured as", "aware", "agnostic"]
    assert [line[2:] for line in body] == [
        ["`d2o` over `h2o`", "holds", "no difference seen"],
        ["`cam` over `streaming:positions=absolute`", "reversed", "–"],
    ]


def test_peers_are_ahead_or_below() -> None:
    peer = {"peer": "kvpress 0.5.5", "other_held": 1.0}
    ahead = finding(PEERS, "ada", PRESSES["ada"], 0.2, **peer, masks_only=True)
    parts = tables([*ahead, *finding(PEERS, "tova", "TOVAPress", -0.2, **peer)])
    heads, *body = cells(parts[PEERS])
    assert heads[-4:] == ["ours is", "bytes of full, ours", "theirs", "more in ours"]
    assert [line[1] for line in body] == [f"`{PRESSES['ada']}` (avg 7) †", "`TOVAPress`"]
    assert [line[-4:-1] for line in body] == [["ahead", "20.0%", "100.0%"], ["below", "20.0%", "100.0%"]]
    assert "2 pairs of method and protocol: ahead in 1, no difference seen in 0, below in 1." in parts["summary"]
    assert "kvpress 0.5.5. 8 samples" in parts[PEERS]
    assert "† hides" in parts[PEERS]


def test_a_table_without_results_says_how_they_are_made() -> None:
    assert tables([]) == dict.fromkeys(
        ["summary", *(claim.name for claim in CLAIMS), PEERS, AT_BYTES, UNEQUAL], MISSING
    )


def test_the_page_has_a_heading_for_every_claim() -> None:
    page = (ROOT / "docs" / "explanation" / "orderings.md").read_text(encoding="utf-8")
    for claim in CLAIMS:
        assert f"## {claim.title}\n\n<!-- {claim.name} -->\n" in page


def test_the_script_writes_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(folder: Path, *more: str) -> list[dict[str, Any]]:
        file = ROOT / "benchmarks" / "quality" / "orderings.py"
        out = tmp_path / "o.json"
        monkeypatch.setattr(sys, "argv", [str(file), str(folder), "--out", str(out), *more])
        runpy.run_path(str(file), run_name="__main__")
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found

    folder = made(tmp_path / "run", {"h2o": [1.0, 1.0], "window": [0.0, 0.0]})
    assert [item["mean"] for item in script(folder)] == [1.0] * 3
    assert "3 comparisons" in capsys.readouterr().out
    other = made(tmp_path / "other", {"h2o": [0.0, 0.0], "window": [0.0, 0.0], "h2o:decay=0.9": [1.0, 0.0]})
    means = {(item["claim"], item["second"]): item["mean"] for item in script(other, "--claim", "forget")}
    assert means == {("heavy", "window"): 1.0, ("forget", "h2o"): 0.5, ("forget", "window"): 0.5}


def test_ours_in_the_settings_of_a_press_has_a_row_of_its_own(tmp_path: Path) -> None:
    each, once = (name for name in ALIKE if name.startswith("h2o"))
    ours = made(tmp_path / "ours", {"h2o": [0.0, 0.0], each: [1.0, 1.0], once: [1.0, 0.0]})
    theirs = made(tmp_path / "theirs", {PRESSES["h2o"]: [1.0, 0.0]}, peer="kvpress 0.5.5")
    found = {f.first: f.mean for f in Runs([ours, theirs]).findings() if f.budget == "all"}
    assert found == {"h2o": -0.5, each: 0.5, once: 0.0}


def test_some_pairs_measured_anew() -> None:
    def known(first: str, protocol: str, mean: float) -> ClaimResult:
        return replace(finding("heavy", first, "window", mean)[0], protocol=protocol)

    before = [
        known("h2o", "aware", 0.1),
        known("h2o", TEXT, 0.2),
        known("ada", "aware", 0.3),
        known("ada", TEXT, 0.4),
        known("snapkv", TEXT, 0.5),
    ]
    found = [known("ada", TEXT, 0.6), known("h2o", TEXT, 0.5), known("tova", TEXT, 0.7)]
    assert renewed(before, found) == [before[0], found[1], before[2], found[0], before[4], found[2]]
    assert renewed([], found) == found


def test_equal_entries_and_equal_bytes_stand_apart(tmp_path: Path) -> None:
    rows, records = [], []
    for name, peer in (("snapkv", "millpond"), (PRESSES["snapkv"], "kvpress 0.5.5")):
        for budget in ("5%", "64"):
            rows.append(row(name, "t", 1.0, budget, peer=peer))
            records += answers(rows[-1], [1.0, 1.0])
    found = Runs([save(tmp_path, rows, records)]).findings()
    assert [(f.claim, f.budget) for f in found] == [(PEERS, "5%"), (PEERS, "all"), (AT_BYTES, "64"), (AT_BYTES, "all")]
    page = tables(found)
    assert "`snapkv` (max 21)" in page[AT_BYTES]
    assert "kernel_size=7` (avg 7)" in page[AT_BYTES]


def test_only_pairs_that_hold_as_many_bytes_count_as_equal() -> None:
    peer = {"peer": "kvpress 0.5.5"}
    same = finding(AT_BYTES, "snapkv", PRESSES["snapkv"], 0.3, **peer, held=0.2, other_held=0.197)
    more = finding(AT_BYTES, "pyramidkv", PRESSES["pyramidkv"], 0.3, **peer, held=0.2, other_held=0.185)
    less = finding(AT_BYTES, "chunkkv", PRESSES["chunkkv"], -0.3, **peer, held=0.2, other_held=0.196 * 1.05)
    masks = finding(AT_BYTES, "ada", PRESSES["ada"], 0.3, **peer, held=1.0, other_held=1.0, masks_only=True)
    page = tables([*same, *more, *less, *masks])
    assert [line[0] for line in cells(page[AT_BYTES])[1:]] == ["`snapkv` (max 21)"]
    apart = {line[0].split("`")[1]: line[-1] for line in cells(page[UNEQUAL])[1:]}
    assert apart == {"pyramidkv": "+8.1%", "chunkkv": "-2.8%", "ada": "+0.0%"}
    assert "as many bytes (within 2 %), 1 pairs of method and protocol: ahead in 1, no" in page["summary"]
    assert "but -3 to 8 % more bytes in ours or all bytes held by a press that masks, 3 pairs" in page["summary"]


def test_the_committed_page_says_equal_bytes_of_none_that_differ_by_more() -> None:
    found = [f for f in read_findings(COMMITTED) if f.claim == AT_BYTES and f.budget == ALL]
    page = tables(found)
    differ = {f.first for f in found if f.masks_only or not 0.98 <= f.held / f.other_held <= 1.02}
    assert {"ada", "pyramidkv", "chunkkv"} <= differ
    for name in differ:
        assert f"`{name}`" not in page[AT_BYTES]
        assert f"`{name}`" in page[UNEQUAL]


def test_every_method_over_snapkv_says_its_pool() -> None:
    assert pool("snapkv:kernel=1") == pool("h2o") == pool("KeyDiffPress", "kvpress 0.5.5") == ""
    assert pool("ada:score=pyramidkv/score=snapkv/pool=avg/kernel=5") == "avg 5"
    assert pool("criticalkv") == "max 21"
    assert pool("ObservedAttentionPress", "kvpress 0.5.5") == ""
