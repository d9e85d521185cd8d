"""Plans: what they say, what they refuse, and their JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from millpond.engine.offload.plan import (
    ENGINE,
    EVERYTHING,
    MAX_BYTES,
    Plan,
    Prediction,
    from_json,
    load_plan,
    save_plan,
    to_json,
)
from millpond.errors import DataError, OptionError

PREDICTION = Prediction(
    seconds=10.0,
    prefill_s=4.0,
    decode_s=6.0,
    tokens_per_s=3.0,
    prefill_tokens_per_s=100.0,
    decode_tokens_per_s=5.0,
    prefill_bound="compute",
    decode_bound="disk reads",
    bytes={"host": {"kv": 7}},
    what_if={"twice the memory": 4.0},
)
PLAN = Plan(weights={"host": 0.25, "disk": 0.75}, micro_batch=8, block=16, model="abc", prediction=PREDICTION)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": {"host": 0.5}}, r"shares of weights \(host 0.5\) sum to 0.5; they must sum to 1"),
        ({"kv": {}}, r"shares of kv \(none\) sum to 0"),
        ({"weights": {"host": float("nan")}}, "must be a share from 0 to 1"),
        ({"weights": {"host": True}}, "must be a share from 0 to 1"),
        ({"weights": {"host": 1.5, "disk": -0.5}}, "must be a share from 0 to 1"),
        ({"weights": {"dsk": 1.0}}, "unknown tier of weights 'dsk'; did you mean 'disk'"),
        ({"weights": 1.0}, "must name shares of tiers"),
        ({"schedule": "zigzg"}, "unknown schedule 'zigzg'; did you mean 'zigzag'"),
        ({"micro_batch": 0}, "micro_batch=0 must be a whole number of at least 1"),
        ({"block": 2.5}, "block=2.5 must be a whole number"),
        ({"slots": 1}, "slots=1 must be a whole number of at least 2"),
        ({"schedule": "row", "micro_batch": 4, "block": 8}, "row' runs one micro-batch in a sweep"),
    ],
)
def test_what_a_plan_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Plan(**fields)


@pytest.mark.parametrize("n_layers", [1, 5, 30])
def test_layers_that_stay_are_spread_evenly(n_layers: int) -> None:
    for kept in range(n_layers + 1):
        plan = Plan(weights={"host": kept / n_layers, "disk": 1 - kept / n_layers})
        stay, read = plan.kept_layers(n_layers), plan.streamed_layers(n_layers)
        assert len(stay) == kept
        assert sorted([*stay, *read]) == list(range(n_layers))
        gaps = [b - a for a, b in pairwise(stay)]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_json_gives_the_plan_back(tmp_path: Path) -> None:
    assert from_json(to_json(PLAN)) == PLAN
    save_plan(PLAN, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == PLAN
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    assert from_json('{"weights": {"disk": 1}}') == Plan(weights={"disk": 1.0})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", DataError, "no JSON"),
        ("[" * 100_000, DataError, "no JSON"),
        ("[]", DataError, "list in place of a JSON object"),
        ('{"format": 2}', DataError, "another version"),
        ('{"wieghts": {}}', OptionError, "unknown field of a plan 'wieghts'; did you mean 'weights'"),
        ('{"model": 3}', OptionError, "must be a fingerprint"),
        ('{"prediction": {}}', DataError, "damaged prediction"),
        ('{"prediction": 3}', DataError, "damaged prediction"),
        ('{"weights": {"host": "1"}}', OptionError, "must be a share"),
    ],
)
def test_json_that_is_no_plan(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_json(text)


@pytest.mark.parametrize(
    ("name", "value"), [("seconds", "NaN"), ("seconds", -1), ("bytes", {"moon": {}}), ("prefill_bound", 3), ("more", 1)]
)
def test_a_damaged_prediction_is_refused(name: str, value: Any) -> None:
    found = json.loads(to_json(PLAN))
    found["prediction"][name] = float("nan") if value == "NaN" else value
    with pytest.raises(DataError, match="damaged prediction"):
        from_json(json.dumps(found))


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(DataError, match="too many for a plan"):
        load_plan(tmp_path / "plan.json")


def test_the_engine_refuses_what_it_does_not_run() -> None:
    ENGINE.check(PLAN)
    ENGINE.check(Plan(kv={"host": 0.5, "disk": 0.5}))
    with pytest.raises(OptionError, match="of the kv on the tier 'device': no accelerator is used"):
        ENGINE.check(Plan(kv={"device": 1.0}))
    with pytest.raises(OptionError, match=r"100% of the kv on the tier 'disk'.*not move it there yet.*on host"):
        replace(ENGINE, kv=("host",)).check(Plan(kv={"disk": 1.0}))
    with pytest.raises(OptionError, match="no accelerator is used"):
        ENGINE.check(Plan(weights={"device": 1.0}))
    ENGINE.check(Plan(schedule="diagonal"))
    with pytest.raises(OptionError, match="'diagonal' is known to the cost model, but this engine does not run it"):
        replace(ENGINE, schedules=("row", "zigzag")).check(Plan(schedule="diagonal"))
    EVERYTHING.check(Plan(kv={"disk": 1.0}, schedule="diagonal"))


def test_a_plan_of_another_model_is_refused() -> None:
    PLAN.check_model("abc")
    Plan().check_model("anything")
    with pytest.raises(OptionError, match="fingerprint abc, and this one has xyz"):
        PLAN.check_model("xyz")


@pytest.mark.parametrize(("share", "on_disk"), [(0.0, ()), (0.5, (0, 1, 3)), (0.6, (0, 1, 3)), (1.0, (0, 1, 2, 3, 4))])
def test_whole_layers_of_kv_lie_on_the_disk(share: float, on_disk: tuple[int, ...]) -> None:
    plan = Plan(kv={"host": 1 - share, "disk": share})
    assert plan.kv_layers_on_disk(5) == on_disk
    assert plan.streamed_layers(5) == ()


def test_layers_on_the_device_are_some_of_those_that_stay() -> None:
    plan = Plan(weights={"device": 0.25, "host": 0.25, "disk": 0.5})
    assert set(plan.device_layers(8)) < set(plan.kept_layers(8))
    assert (len(plan.device_layers(8)), len(plan.kept_layers(8))) == (2, 4)
    assert Plan(weights={"device": 1.0}).device_layers(3) == (0, 1, 2)
    assert Plan().device_layers(3) == ()
