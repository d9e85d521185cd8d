"""Layouts compared by goodput, the verdict, and the commands."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.errors import DataError, OptionError
from millpond_lab.cli.cluster.plan import _cells
from millpond_lab.cluster_plan.layout import FREE_MOVES, CacheSize, ClusterLayout, Link, MoveTimes, WorkerPlan
from millpond_lab.cluster_plan.place import (
    Demand,
    Devices,
    Goodput,
    ServiceLevels,
    Shape,
    compare,
    goodput,
    split_anywhere,
    split_in_a_node,
    together,
)
from millpond_lab.cluster_plan.profile import DecodeTimes, StepLoad, StepTimes, fit, fit_moves
from millpond_lab.cluster_plan.profile_file import Profile, built_in, from_json, load_profile, save_profile, to_json
from millpond_lab.cluster_plan.report import Verdict, judge
from millpond_lab.cluster_plan.report import to_json as to_plan

#: Reading takes long and stops all answers: splitting pays.
SLOW_TO_READ = StepTimes(0.0, 1e-3, 0.0, (DecodeTimes(None, 0.002, 0.0, 1e-5),))
CACHE = CacheSize(1000, 1000)
DEMAND = Demand([(400, 12)] * 40, ServiceLevels(ttft=2.0, tpot=0.01), requests=40, seeds=(0, 1))


def test_goodput_is_the_rate_at_which_nine_of_ten_are_in_time() -> None:
    layout = ClusterLayout((WorkerPlan("both", SLOW_TO_READ),))
    found = goodput(layout, CACHE, Link(), DEMAND)
    tighter = goodput(layout, CACHE, Link(), Demand(DEMAND.lengths, ServiceLevels(0.5, 0.01), 40, (0, 1)))
    assert found.per_device > tighter.per_device
    assert found.interval[0] <= found.per_device <= found.interval[1]
    never = goodput(layout, CACHE, Link(), Demand(DEMAND.lengths, ServiceLevels(0.3, 0.01), 40, (0,)))
    assert never.rates == (0.0,)  # a prompt takes 0.4 s alone


def test_prompts_that_take_no_time_have_a_goodput() -> None:
    free = StepTimes(0.0, 0.0, 0.0, (DecodeTimes(None, 0.002, 0.0, 1e-5),))  # as a fit on a busy machine may find
    found = goodput(ClusterLayout((WorkerPlan("both", free),)), CACHE, Link(), DEMAND)
    assert found.per_device > 0
    assert found.at_least, "all 40 requests come at once, and no rate is too high"


@pytest.mark.parametrize(
    ("levels", "at_least"),
    [(ServiceLevels(2.0, 0.01), False), (ServiceLevels(0.3, 0.01), False), (ServiceLevels(1e6, 1e6), True)],
)
def test_the_end_of_the_search_is_no_goodput(levels: ServiceLevels, at_least: bool) -> None:
    demand = Demand(DEMAND.lengths, levels, 40, (0,))
    found = goodput(ClusterLayout((WorkerPlan("both", SLOW_TO_READ),)), CACHE, Link(), demand)
    assert found.at_least is at_least
    rows = compare(Devices({1: SLOW_TO_READ}, 2, 2), CACHE, Link(), demand)
    verdict = judge(rows, CACHE, Link(), demand)
    assert [row["at_least"] for row in to_plan(rows, verdict)["rows"]] == [row.at_least for row in rows]
    assert any("at least" in reason for reason in verdict.reasons) is at_least
    assert [cell.startswith("at least ") for cell in (_cells(row)[2] for row in rows)] == [row.at_least for row in rows]


def test_nothing_is_ahead_of_a_figure_that_is_not_known() -> None:
    one = ClusterLayout((WorkerPlan("both", SLOW_TO_READ),))
    two = next(split_in_a_node(Devices({1: SLOW_TO_READ}, 2, 2)))
    rows = [Goodput(two, (30.0, 30.0), 1.0), Goodput(one, (2.0, 2.0), 0.0)]
    assert judge(rows, CACHE, Link(), DEMAND).split
    assert not judge([rows[0], Goodput(one, (2.0, 2.0), 0.0, at_least=True)], CACHE, Link(), DEMAND).split
    assert judge([Goodput(two, (30.0, 30.0), 1.0, at_least=True), rows[1]], CACHE, Link(), DEMAND).split


def test_splitting_is_recommended_where_prompts_stop_answers() -> None:
    devices = Devices({1: SLOW_TO_READ}, 3, 3)
    rows = compare(devices, CACHE, Link(1e9), DEMAND)
    verdict = judge(rows, CACHE, Link(1e9), DEMAND)
    assert verdict.split
    assert verdict.best.layout.splits
    assert "Split" in verdict.reasons[-1]


def test_a_slow_link_is_named_as_the_reason_against() -> None:
    devices, slow = Devices({1: SLOW_TO_READ}, 3, 3), Link(2e5)
    rows = compare(devices, CACHE, slow, DEMAND)
    verdict = judge(rows, CACHE, slow, DEMAND)
    assert not verdict.split
    assert "moving the caches holds it back" in verdict.reasons[-1]
    small = CacheSize(1000, 20)  # a fiftieth of the bytes turns it round
    assert judge(compare(devices, small, slow, DEMAND), small, slow, DEMAND).split


def test_moves_that_occupy_workers_lower_a_split_and_leave_other_layouts() -> None:
    free, costly = (
        Devices({1: SLOW_TO_READ}, 3, 3, moves=moves) for moves in (FREE_MOVES, MoveTimes(0.1, 1e-7, 0.01, 1e-8))
    )
    before, after = (compare(devices, CACHE, Link(1e9), DEMAND) for devices in (free, costly))
    rates = [{row.layout.name: row.rates for row in rows if len(row.rates) == 2} for rows in (before, after)]
    assert rates[0]["1 both"] == rates[1]["1 both"]
    names = {name for name in rates[0].keys() & rates[1].keys() if name != "1 both"}
    assert names
    assert all(max(rates[1][name]) < min(rates[0][name]) for name in names)


def test_engines_that_moves_occupy_are_named_as_the_reason_against() -> None:
    devices = Devices({1: SLOW_TO_READ}, 3, 3, moves=MoveTimes(take_base=0.3))
    verdict = judge(compare(devices, CACHE, Link(1e9), DEMAND), CACHE, Link(1e9), DEMAND)
    assert not verdict.split
    assert "packing caches and taking them in holds it back" in verdict.reasons[-1]


def test_where_nothing_is_disturbed_splitting_loses_devices() -> None:
    quick = StepTimes(1e-6, 1e-7, 0.0, (DecodeTimes(None, 0.005, 0.0, 1e-3),))
    rows = compare(Devices({1: quick}, 2, 2), CACHE, Link(), DEMAND)
    verdict = judge(rows, CACHE, Link(), DEMAND)
    assert not verdict.split
    assert "moves do not matter" in verdict.reasons[-1]


def test_layouts_that_fit() -> None:
    devices = Devices({1: SLOW_TO_READ, 2: SLOW_TO_READ}, 8, 4)
    assert [layout.devices for layout in together(devices)] == [1, 2]
    found = list(split_in_a_node(devices))
    assert all(layout.devices <= 4 for layout in found)
    assert len({layout.name for layout in found}) == len(found)
    assert "2 prefill + 1 decode" in {layout.name for layout in found}
    assert "2 prefill + 2 decode" not in {layout.name for layout in found}  # 1 + 1 twice


def test_phases_placed_by_themselves_balance_their_rates() -> None:
    layout = split_anywhere(Devices({1: SLOW_TO_READ}, 6, 1), CACHE, Link(), DEMAND)
    assert layout is not None
    readers = sum(worker.role == "prefill" for worker in layout.workers)
    assert readers >= 2  # reading is what takes long
    assert layout.devices <= 6


#: Two devices that share each layer read hardly faster than one, and decode twice as fast.
SHARED = StepTimes(0.0, 0.95e-3, 0.0, (DecodeTimes(None, 0.001, 0.0, 5e-6),))


def test_layouts_of_several_stages_that_fit() -> None:
    devices = Devices({1: SLOW_TO_READ, 2: SHARED}, 8, 2, stages=(1, 2))
    assert [(shape.shared, shape.stages) for shape in devices.shapes()] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    assert [layout.devices for layout in together(devices)] == [1, 2, 2, 4]
    found = {layout.name for layout in split_in_a_node(devices)}
    assert found == {"1 prefill + 1 decode", "1 prefill x 2 devices in 2 stages + 1 decode x 2 devices in 2 stages"}
    with pytest.raises(OptionError, match="stages"):
        Devices({1: SLOW_TO_READ}, 8, 2, stages=(0,))
    with pytest.raises(OptionError, match="4 devices at least"):
        Devices({1: SLOW_TO_READ}, 3, 3, stages=(4,))


def test_each_phase_has_the_parallelism_that_suits_it() -> None:
    """Prompts take turns in stages, since two devices read one hardly faster; an answer's level needs shared layers."""
    demand = Demand([(400, 12)] * 100, ServiceLevels(ttft=1.0, tpot=0.0017), requests=60, seeds=(0,))
    devices = Devices({1: SLOW_TO_READ, 2: SHARED}, 4, 1, stages=(1, 2))
    assert split_anywhere(devices, CACHE, Link(), demand) is None, "no node has two devices"
    devices = replace(devices, per_node=2)
    layout = split_anywhere(devices, CACHE, Link(), demand)
    assert layout is not None
    assert layout.name == "1 prefill x 2 devices in 2 stages + 1 decode x 2 devices"
    row = Goodput(layout, (1.0,), 0.0)
    written = to_plan([row], Verdict(row, True, ()))
    assert {"role": "prefill", "devices": 2, "stages": 2} in written["workers"]
    assert {"role": "decode", "devices": 2} in written["workers"]


@pytest.mark.parametrize(
    ("rates", "count", "name"),
    [
        ((1.0, 2.5), 2, "1 prefill + 1 decode"),  # 0.4 of a decoder is one
        ((1.0, 2.5), 3, "2 prefill + 1 decode"),  # 0.8 of one: 2 requests/s of 3 devices
        ((1.0, 2.5), 1, None),
        ((2.0, 1.5), 3, "1 prefill + 2 decode"),  # 1.3 decoders are two
        ((1.0, 2.0), 4, "2 prefill + 1 decode"),  # a third reader adds nothing, and takes a device
    ],
)
def test_there_are_as_many_decoders_as_answer_all_that_is_read(
    rates: tuple[float, float], count: int, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone(devices: Devices, role: str, n: Shape, *_: object) -> Goodput:
        layout = ClusterLayout((devices.worker("prefill", n), devices.worker("decode", n)))
        return Goodput(layout, (rates[role == "decode"],), 0.0)

    monkeypatch.setattr("millpond_lab.cluster_plan.place._alone", alone)
    layout = split_anywhere(Devices({1: SLOW_TO_READ}, count, 1), CACHE, Link(), DEMAND)
    assert (None if layout is None else layout.name) == name


@pytest.mark.parametrize(("count", "per_node"), [(0, 1), (1, 0), (1, 1)])
def test_devices_that_hold_no_worker(count: int, per_node: int) -> None:
    with pytest.raises(OptionError, match="at least"):
        Devices({2: SLOW_TO_READ}, count, per_node)


# ------------------------------------------------------------------ profiles


def test_a_fit_finds_the_times_that_made_the_steps() -> None:
    made = StepTimes(0.03, 1e-4, 2e-8, (DecodeTimes(None, 0.02, 3e-6, 5e-4),), per_prompt=0.004)
    loads = [StepLoad(n, n * n, n % 2) for n in range(10, 400, 13)]
    loads += [StepLoad(answers=b, entries=b * e) for b in (1, 2, 5, 9) for e in (10, 100, 700)]
    loads += [StepLoad(n, n * n, 1, b, 50 * b) for n in (20, 50, 170) for b in (1, 4)]
    found, error = fit([(load, made.seconds(load)) for load in loads])
    assert error < 1e-6
    for load in loads:
        assert found.seconds(load) == pytest.approx(made.seconds(load), rel=1e-6)


def test_a_fit_is_right_in_the_mean_where_steps_vary() -> None:
    """Half of the steps take twice as long: their mean is what a simulation adds up."""
    loads = [StepLoad(n, n * n, 1) for n in range(10, 400, 4)] + [StepLoad(answers=1, entries=n) for n in range(200)]
    steps = [(load, 0.02 * (1 + n % 2)) for n, load in enumerate(loads)]
    found, _ = fit(steps)
    for kind in (loads[:98], loads[98:]):
        assert sum(found.seconds(load) for load in kind) == pytest.approx(0.03 * len(kind), rel=0.02)


def test_a_fit_finds_the_batch_above_which_answers_take_longer() -> None:
    made = StepTimes(0.01, 1e-4, 0.0, (DecodeTimes(4, 0.01, 1e-6, 1e-4), DecodeTimes(None, 0.005, 1e-6, 2e-3)))
    loads = [StepLoad(n, n * n, 1) for n in range(10, 200, 9)]
    loads += [StepLoad(answers=b, entries=b * e) for b in (1, 2, 4, 8, 12, 16) for e in (10, 50, 200, 700)]
    found, error = fit([(load, made.seconds(load)) for load in loads])
    assert [part.most for part in found.decode] == [4, None]
    assert error < 1e-6


def test_a_fit_has_no_negative_terms() -> None:
    loads = [StepLoad(n, n * n, 1) for n in range(10, 200, 9)] + [StepLoad(answers=b, entries=b) for b in range(1, 20)]
    found, _ = fit([(load, 0.1 - 1e-5 * load.tokens) for load in loads])
    assert min(found.read_base, found.per_token, found.per_square, found.decode[0].per_entry) >= 0


def test_a_fit_of_moves_tells_bytes_from_moves() -> None:
    assert fit_moves([100, 1100], [0.011, 0.021]) == (pytest.approx(0.01), pytest.approx(1e-5))
    base, per_byte = fit_moves([100, 1000], [0.001, 0.05])  # a line through both would begin below 0
    assert base == 0
    assert 0.001 / 100 < per_byte < 0.05 / 1000
    assert fit_moves([500, 500], [0.01, 0.03]) == (pytest.approx(0.02), 0.0)


def test_a_fit_needs_steps_of_both_kinds() -> None:
    with pytest.raises(DataError, match="0 that decode"):
        fit([(StepLoad(n, n * n), 0.1) for n in range(1, 30)])


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    moves = MoveTimes(0.1, 2e-9, 0.3, 4e-9)
    profile = Profile("mine", {1: SLOW_TO_READ, 2: SLOW_TO_READ}, CACHE, 64, True, "a test", 300, moves)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(str(tmp_path / "p.json")) == profile
    with pytest.raises(OptionError, match="measured with its own budget and codec"):
        profile.with_cache("20%", "auto")


def test_a_built_in_profile_takes_a_budget_and_a_codec() -> None:
    profile = built_in("opt-13b")
    assert profile.cache.entry_bytes == 819_200  # 40 layers, keys and values of 5,120 numbers of 2 bytes
    small = profile.with_cache("20%", "int4").cache
    assert small.kept(1000) == 200
    assert 0.25 < small.stored_bytes / small.entry_bytes < 0.35
    assert profile.with_cache(None, "auto") is profile
    with pytest.raises(OptionError, match="opt-13b"):
        load_profile("a100:opt-13")


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"times": {}},
        {"times": {"0": {}}},
        {"times": {"1": {"decode": []}}},
        {"entry_bytes": -1},
        {"entry_bytes": math.inf},
        {"budget": 3},
        {"stored_bytes": True},
        {"head_dim": "a"},
        {"times": [1]},
        {"step_tokens": 0.5},
        {"moves": {}},
        {"moves": 1},
        {"moves": None},
        {"moves": {"pack_base": -1, "pack_per_byte": 0, "take_base": 0, "take_per_byte": 0}},
    ],
)
def test_a_damaged_profile_is_refused(change: dict[str, object]) -> None:
    good = json.loads(to_json(Profile("mine", {1: SLOW_TO_READ}, CACHE, 64)))
    assert from_json(json.dumps(good)).name == "mine"
    older = {name: value for name, value in good.items() if name != "moves"}
    assert from_json(json.dumps(older)).moves == FREE_MOVES
    with pytest.raises(DataError, match="millpond cluster profile"):
        from_json(json.dumps(good | change))
    with pytest.raises(DataError, match="no JSON"):
        from_json("{")


# ------------------------------------------------------------------ the commands


@pytest.mark.slow
def test_from_a_measured_profile_to_a_plan(tmp_path: Path) -> None:
    out, plan = tmp_path / "p.json", tmp_path / "plan.json"
    profile = ["cluster", "profile", "--model", "pond-recall", "--budget", "20%", "--prompts", "40,64", "--new", "4"]
    result = CliRunner().invoke(app, [*profile, "--rounds", "1", "--threads", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    measured = load_profile(str(out))
    assert measured.times[1].seconds(StepLoad(40, 1600, 1)) > 0
    assert measured.cache.kept(100, 9) == 20
    moved = measured.cache.moved(64)
    assert 0 < measured.moves.packing(moved) < 5
    assert 0 < measured.moves.taking_in(moved) < 5
    assert "ms to pack" in result.output
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{n:02d}.0000000,{400 + n},{5 + n % 3}" for n in range(40)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n", encoding="utf-8")
    command = ["cluster", "plan", "--profile", str(out), "--trace", f"azure:{trace}", "--devices", "2"]
    few = ["--requests", "20", "--seeds", "1"]
    result = CliRunner().invoke(app, [*command, *few, "--slo", "ttft=600,tpot=600", "--out", str(plan)])
    assert result.exit_code == 0, result.output
    written = json.loads(plan.read_text())
    assert {row["layout"] for row in written["rows"]} == {"1 both", "1 prefill + 1 decode"}
    assert written["workers"][0]["role"] in ("both", "prefill")
    assert all(row["goodput_per_device"] > 0 for row in written["rows"])


@pytest.mark.slow
def test_a_profile_says_that_requests_cannot_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> MoveTimes:
        raise OptionError("keys and values lie on a disk")

    monkeypatch.setattr("millpond_lab.cluster_plan.record.measure_moves", refuse)
    out = tmp_path / "p.json"
    profile = ["cluster", "profile", "--model", "pond-recall", "--prompts", "12,24", "--new", "4", "--rounds", "1"]
    result = CliRunner().invoke(app, [*profile, "--threads", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "cannot move" in result.output
    assert "keys and values lie on a disk" in result.output
    assert load_profile(str(out)).moves == FREE_MOVES


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--slo", "ttft=1"], "both levels"),
        (["--link", "5"], "25Gbit"),
        (["--link", "0Gbit"], "above 0"),
        (["--profile", "a100:gpt"], "opt-13b"),
        (["--trace", "azur:x"], "azure"),
        (["--trace", "x"], "KIND:PATH"),
        (["--longest", "2"], "raise --longest"),
        (["--stages", "1,x"], "must read 1,2,4"),
        (["--stages", "0"], "from 1 to 64"),
        (["--stages", "2"], "2 devices at least"),
        (["--requests", "1000"], "40 usable"),
    ],
)
def test_what_a_plan_refuses(given: list[str], said: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{n:02d}.0000000,40,5" for n in range(40)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n", encoding="utf-8")
    usual = ["--trace", f"azure:{trace}", "--slo", "ttft=1,tpot=1", "--devices", "1", "--requests", "10"]
    result = CliRunner().invoke(app, ["cluster", "plan", *usual, *given])
    assert result.exit_code == 2
    assert said in result.output + result.stderr
