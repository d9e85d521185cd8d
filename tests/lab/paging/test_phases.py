"""MARK&PREDICT in the phase setup: bits of phases in replays, with errors, and of a predictor fitted to them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from millpond.cache.paging import PAGING
from millpond.cache.paging.predictor import label_of, load_weights
from millpond.cli.app import app
from millpond.errors import DataError
from millpond_lab.bench.paging.candidates import WITH_BITS, PagingTrace
from millpond_lab.bench.paging.run import run
from millpond_lab.bench.paging.table import paging_markdown
from millpond_lab.paging.marker import MarkAndPredict
from millpond_lab.paging.replay import phase_bits, replay
from millpond_lab.train.pager.fit import fit_pager
from tests.cache.paging.traces import Requests, chains, loop, pages_at_random

IN_PHASES = [name for name in WITH_BITS if name.startswith("mark_predict")]


def test_bits_by_hand() -> None:
    """Phases of two pages: 1 2 1 | 3 1 | 2 3 | 3 is in the phase before it."""
    requests = [(1,), (2,), (1,), (3,), (1,), (2,), (3,), (3,)]
    assert phase_bits(requests, 2) == [False, True, False, False, True, True, True, True]
    assert phase_bits([(1, 2), (1, 3), (1, 2, 3)], 2) == phase_bits([(1,), (2,), (1,), (3,), (1,), (2,), (3,)], 2)
    assert phase_bits([(1,), (2,)], 5) == [True, True]


def test_a_phase_is_a_longest_run() -> None:
    """Each access compared with a search through what follows."""
    requests = chains(120, 3)
    keys, pages = [key for path in requests for key in path], 9
    bits, begin = phase_bits(requests, pages), 0
    while begin < len(keys):
        ends = [begin]
        for _ in range(2):  # this phase and the next
            end = ends[-1]
            while end < len(keys) and len(set(keys[ends[-1] : end + 1])) <= pages:
                end += 1
            ends.append(end)
        following = set(keys[ends[1] : ends[2]])
        assert bits[begin : ends[1]] == [key not in following for key in keys[begin : ends[1]]]
        begin = ends[1]


@pytest.mark.parametrize("candidate", IN_PHASES)
@pytest.mark.parametrize("requests", [pages_at_random(900, 30, 4), loop(700, 13) + pages_at_random(400, 30, 5)])
def test_misses_stay_below_the_bound(candidate: str, requests: Requests) -> None:
    """2 OPT + H_k eta0 + eta1 on average, and 2 H_k OPT + k whatever the bits."""
    trace = PagingTrace(requests, 10)
    _, kind, flipped = WITH_BITS[candidate]
    bits, bound, harmonic = trace.bits(kind, flipped), trace.bound(candidate), sum(1 / i for i in range(1, 11))
    misses = mean(replay(requests, PAGING.get("mark_predict")(seed=seed), 10, bits=bits).misses for seed in range(6))
    assert bound is not None
    assert misses <= bound
    assert misses <= 2 * harmonic * trace.belady.misses + 10
    if not flipped:
        marker = mean(replay(requests, PAGING.get("marker")(seed=seed), 10).misses for seed in range(6))
        assert bound == 2 * trace.belady.misses
        assert misses < marker


def test_errors_are_counted_by_their_kind() -> None:
    """All bits wrong: each 1 is an error of eta0, each 0 one of eta1."""
    trace = PagingTrace(pages_at_random(400, 20, 6), 8)
    right, harmonic = trace.bits("phase", 0.0), sum(1 / i for i in range(1, 9))
    expected = 2 * trace.belady.misses + harmonic * right.count(True) + right.count(False)
    assert trace.bound("mark_predict, all of them flipped") == pytest.approx(expected)
    assert trace.bound("mark0, Belady's bits") == trace.belady.misses
    assert trace.bound("lru") is None
    assert trace.bound("learned, random bits") is None


def test_the_report_has_misses_and_bounds(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in mooncake(60)))
    data = run([f"mooncake:{trace}"], [20], ["lru", *IN_PHASES], cost_pages=0)
    rows = {row["rule"]: row for row in data["results"]}
    assert rows["lru"]["bound"] is None
    for name in IN_PHASES:
        assert rows[name]["misses"] == rows[name]["accesses"] - rows[name]["hits"]
    report = paging_markdown(data | {"command": "it"})
    assert "the paper's bound" in report
    assert report.count("| mark_predict, 20 % of them flipped |") == 2


def mooncake(n: int) -> list[dict[str, Any]]:
    """Requests of 20 pages: 8 that all have, and 12 of one of 30 ends."""
    draw, lines = random.Random(0), []
    for at in range(n):
        end = 100 + 12 * int(30 * draw.random() ** 2)
        ids = [*range(8), *range(end, end + 12)]
        lines.append({"timestamp": 100 * at, "input_length": 512 * 20, "output_length": 4, "hash_ids": ids})
    return lines


def test_a_predictor_of_phases_is_fitted_to_them() -> None:
    requests = chains(900, 7)
    labels = phase_bits(requests, int(0.1 * len({key for path in requests for key in path})))
    fitted = fit_pager([requests], (0.1,), "phase")
    assert fitted.discards == pytest.approx(mean(labels))
    assert fitted.correct > max(mean(labels), 1 - mean(labels))
    assert not np.array_equal(fitted.weights, fit_pager([requests], (0.1,)).weights)


def test_train_pager_writes_what_mark_predict_takes(tmp_path: Path) -> None:
    """On the command line; rules of Belady's bits refuse the file, and MARK&PREDICT does not refit it."""
    trace, file = tmp_path / "trace.jsonl", tmp_path / "phases.safetensors"
    trace.write_text("\n".join(json.dumps(line) for line in mooncake(120)))
    done = CliRunner().invoke(
        app, ["train", "pager", "--trace", f"mooncake:{trace}", "--label", "phase", "--out", str(file)]
    )
    assert done.exit_code == 0, done.output
    assert label_of(file) == "phase"
    rule = PAGING.get("mark_predict")(pager=str(file))
    assert isinstance(rule, MarkAndPredict)
    replay(chains(500, 8), rule, 20)
    assert (rule._bits._predictor.weights == load_weights(file)).all()
    for rule in ("mark0", "learned"):
        with pytest.raises(DataError, match=r"bits are those of phases.*mark_predict.*--label belady"):
            PAGING.get(rule)(pager=str(file))
    wrong = CliRunner().invoke(
        app, ["train", "pager", "--trace", f"mooncake:{trace}", "--label", "x", "--out", str(file)]
    )
    assert wrong.exit_code == 2
    assert "belady" in wrong.output
