"""Scripts of the claims about serving: their arithmetic by hand, and runs in small that go on where one stopped."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from millpond_lab.bench.generate.candidates import ModelShape
from millpond_lab.cluster_plan.place import ServiceLevels
from millpond_lab.cluster_plan.profile import A100
from millpond_lab.cluster_plan.simulate import RequestTimes

PERFORMANCE = Path(__file__).parents[3] / "benchmarks" / "performance"
SHAPE = ModelShape(layers=1, width=32, heads=2, kv_heads=2, head_dim=16, ffn=32, vocab=64)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PERFORMANCE)
    return importlib.import_module


def rows_of(script: Any, path: Path, *key: str) -> Any:
    return script("script").GrowingRows(path, {"seed": 1}, *key)


def test_rows_grow_and_those_of_another_load_are_left(script: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    rows_of(script, file, "name").add({"name": "a", "value": 0.123456789})
    again = rows_of(script, file, "name")
    assert again.has("a")
    assert not again.has("b")
    again.add({"name": "b", "value": 2})
    held = json.loads(file.read_text())
    assert held["rows"] == [{"name": "a", "value": 0.12346}, {"name": "b", "value": 2}]
    assert held["load"] == {"seed": 1}
    assert script("script").GrowingRows(file, {"seed": 2}, "name").rows == []


def test_the_scale_is_what_nine_tenths_need(script: Any) -> None:
    slo = script("slo_scale")
    levels = ServiceLevels(1.0, 0.1)
    outcomes = [RequestTimes(0.1 * n, 0.005) for n in range(1, 21)]  # the first token needs 0.1 to 2.0
    assert slo.needed_scale(outcomes, levels) == pytest.approx(1.8)
    outcomes[3] = RequestTimes(0.1, 0.25)  # one more that needs more, now by its other tokens
    assert slo.needed_scale(outcomes, levels) == pytest.approx(1.9)
    assert slo.needed_scale([RequestTimes(0.5, None)], levels) == 0.5


def test_layouts_hold_the_weights(script: Any) -> None:
    slo = script("slo_scale")
    found = {case.story.name: list(slo.layouts_of(case, A100[case.model])) for case in slo.CASES}
    names = {layout.name for _, layout in found["chat"]}
    assert {"1 both", "1 both x 2 devices", "1 prefill x 2 devices + 1 decode", "2 prefill + 1 decode"} <= names
    assert {layout.name for kind, layout in found["chat, 66B"] if kind == "apart"} >= {
        "1 prefill x 4 devices + 1 decode x 4 devices"
    }
    for layouts in found.values():
        assert all(worker.memory > 0 for _, layout in layouts for worker in layout.workers)


def test_a_run_of_a_layout_tells_a_scale_and_its_goodput(script: Any, tmp_path: Path) -> None:
    slo = script("slo_scale")
    lines = [f"2023-11-16 18:17:{n % 60:02}.0000000,{100 + n},{20 + n % 7}" for n in range(60)]
    (tmp_path / "load.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines))
    story = slo.Story("few", "azure", "load.csv", 2048, 0.25, 0.1)
    case = slo.ScaleCase("opt-13b", 26e9, 1, story, (1.0,))
    rows = rows_of(script, tmp_path / "rows.json", "load", "kind", "layout", "seed")
    args = Namespace(traces=tmp_path, seeds=1, requests=20)
    slo.measure(case, args, rows)
    of_one = {row["kind"]: row for row in rows.rows if row["layout"] == "1 both"}
    (((rate, scale),), ((_, slower),)) = (
        of_one[kind]["scales"] for kind in ("together, steps of 2,048", "together, vLLM's times")
    )
    assert rate == 1.0
    assert slower > scale > 0.1
    assert of_one["together, steps of 2,048"]["goodput"] > 1
    count = len(rows.rows)
    slo.measure(case, args, rows)
    assert len(rows.rows) == count


def test_wrong_bits_cost_misses_within_the_bound(script: Any, tmp_path: Path) -> None:
    errors = script("paging_errors")
    requests = [(n % 7, 100 + n % 7) for n in range(200)]
    trace = errors.PagingTrace(requests, 6)
    rows = rows_of(script, tmp_path / "rows.json", "rule", "wrong", "seed")
    errors.replays(trace, rows, [0, 50], 2)
    misses = {(row["rule"], row["wrong"], row["seed"]): row["misses"] for row in rows.rows}
    least = misses["belady", None, 0]
    assert misses["mark0", 0, 0] == misses["mark0", 0, 1] == least < misses["lru", None, 0]
    assert misses["mark0", 50, 0] > least
    assert misses["mark0", 50, 0] != misses["mark0", 50, 1], "each seed flips other bits"
    bounds = {(row["wrong"], row["seed"]): row["bound"] for row in rows.rows if row["rule"] == "mark0"}
    assert bounds[0, 0] == least
    assert all(misses["mark0", percent, seed] <= bound for (percent, seed), bound in bounds.items())


def test_a_shared_prompt_is_held_once_and_decoded_alike(script: Any) -> None:
    shared = script("shared_prompt")
    args = Namespace(seed=0, own=8, sequences=4, rounds=2, steps=2)
    row = shared.measure(SHAPE.build(), SHAPE.vocab, 256, args)
    once, held, each = (row[mode]["kv_bytes"] for mode in ("once", "held once", "each"))
    assert once == held < each / 2
    assert row["once over each"][1] <= row["once over each"][0] <= row["once over each"][2]


def test_parts_of_a_batch_are_left_out(script: Any) -> None:
    grid = script("batch_grid")
    args = Namespace(prompts=16, shared=64, own=16, repeats=1, seed=0)
    row = grid.measure(SHAPE.build(), SHAPE, args, (4, 0.25, 8))
    distinct = 4 * 64 + 16 * 16
    assert row["read"]["batch"] == row["read"]["no one call"] == distinct < row["read"]["no groups"]
    assert set(row["cpu_s"]) == set(grid.RUNS)
    alone = grid.measure(SHAPE.build(), SHAPE, args, (1, 0.25, 8))
    assert set(alone["cpu_s"]) == {"arrival", "sorted", "batch"}
    assert alone["read"]["batch"] == 16 * 80


def test_answers_of_a_group_have_one_length(script: Any) -> None:
    grid = script("batch_grid")
    prompts = [(group, group, own) for group in range(6) for own in range(3)]
    lengths = grid.new_tokens_of(prompts, 2, "unequal", 0)
    by_group = {group: {lengths[prompt] for prompt in prompts if prompt[0] == group} for group in range(6)}
    assert sorted(min(found) for found in by_group.values()) == [8, 8, 32, 32, 128, 128]
    assert all(len(found) == 1 for found in by_group.values())
    assert set(grid.new_tokens_of(prompts, 2, 32, 0).values()) == {32}


def test_chunks_are_drawn_with_as_many_repeated(script: Any) -> None:
    serving = script("chunk_serving")
    picks = serving.zipf_picks(48, 4, 0.75, 0)
    assert serving.repeated_share(picks) == pytest.approx(0.75, abs=0.02)
    assert serving.repeated_share([[1, 2], [2, 3], [1, 2]]) == 0.5
    assert all(len(set(pick)) == 4 for pick in picks)


def test_ways_of_serving_chunks(script: Any) -> None:
    serving = script("chunk_serving")
    args = Namespace(queries=8, picked=2, repeated=0.5, seed=0, system=32, tokens=16, question=8, new=2, in_flight=3)
    prompts, _ = serving.stream(args, None, SHAPE.vocab)
    model = SHAPE.build().float()
    found = {way: serving.serve(model, way, prompts, args) for way in serving.WAYS}
    whole = 8 * (32 + 2 * 16 + 8)
    assert found["plain"]["read"] == whole
    assert found["both"]["read"] < found["chunks"]["read"] < whole
    assert found["prefix"]["read"] <= whole - 7 * 32, "the system prompt is read once"
    assert 0 < found["plain"]["first"] <= found["plain"]["latency"]
    assert found["prefix"]["tokens"] == found["plain"]["tokens"]
