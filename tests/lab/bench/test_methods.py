"""`bench methods`: who takes part, what each may cost, what is timed, and the report."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import millpond as mp
from millpond.cli.app import app
from millpond.errors import OptionError
from millpond.hf.stopwatch import Stopwatch
from millpond.methods import METHODS
from millpond.policy.policy import Policy
from millpond_lab.bench.common.report import methods_markdown
from millpond_lab.bench.generate.candidates import ModelShape, draw_prompts
from millpond_lab.bench.methods import run as bench
from millpond_lab.bench.methods import timed_run
from millpond_lab.bench.methods.candidate import MethodCandidate, MethodTiming
from millpond_lab.bench.methods.run import QUICK, MethodsPlan, candidates_of
from millpond_lab.bench.methods.timed_run import PlanClock, TimedRun, step_s

TINY = replace(
    QUICK,
    shape=ModelShape(layers=2, width=32, heads=2, kv_heads=1, head_dim=16, ffn=32, vocab=64),
    prompt=200,
    new_tokens=6,
    repeats=2,
)


def picked(*names: str, **plan: Any) -> MethodsPlan:
    return replace(TINY, methods=tuple((name, {}) for name in names), **plan)


# ---------------------------------------------------------------------- who takes part


def test_nobody_is_left_out_today() -> None:
    candidates, left_out = candidates_of(QUICK)
    assert left_out == []
    assert [e.name for e in candidates] == [*METHODS.names(), "snapkv"]
    assert [e.again for e in candidates] == [False] * len(METHODS.names()) + [True]
    assert {e.name for e in candidates if e.given} >= {"fastgen", "kvzip"}


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods that cannot be built as they are."""
    monkeypatch.setattr(METHODS, "_entries", {name: METHODS.get(name) for name in METHODS.names()})

    @METHODS.register("needy")
    def needy(table: str) -> Policy:
        """It needs a table."""
        return METHODS.get("h2o")()

    @METHODS.register("grumpy")
    def grumpy() -> Policy:
        """It refuses."""
        raise RuntimeError("not today")


def test_a_method_that_cannot_be_built_is_left_out_with_the_reason(odd: None) -> None:
    candidates, left_out = candidates_of(QUICK)
    assert {e.name for e in candidates} == set(METHODS.names()) - {"needy", "grumpy"}
    reasons = {method["name"]: method["reason"] for method in left_out}
    assert reasons == {"grumpy": "not today", "needy": "needy has no default for table; name it, as needy:table=..."}
    given = candidates_of(replace(TINY, methods=(("needy", {"table": "1"}),)))[0]
    assert [(e.name, e.setting) for e in given] == [("snapkv", ""), ("needy", "table=1"), ("snapkv", "")]


def test_what_is_asked_for_by_name_is_not_left_out(odd: None) -> None:
    with pytest.raises(OptionError, match="needy has no default for table"):
        candidates_of(picked("needy"))
    with pytest.raises(OptionError, match="did you mean 'snapkv'"):
        candidates_of(picked("snapvk"))


def test_the_anchor_takes_part_and_once_more_without_a_bound() -> None:
    assert [e.name for e in candidates_of(picked("h2o"))[0]] == ["snapkv", "h2o", "snapkv"]
    assert [e.name for e in candidates_of(picked("h2o", "snapkv"))[0]] == ["h2o", "snapkv", "snapkv"]
    other = candidates_of(replace(TINY, methods=(("snapkv", {"decode": "evict"}),)))[0]
    assert [(e.setting, e.again) for e in other] == [("", False), ("decode=evict", False), ("", True)]
    assert other[0].kind == ("grows", 1.05)
    assert other[2].kind == ("noise: the same once more", None)


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("full", {}, ("keeps everything", None)),
        ("snapkv", {}, ("grows", 1.05)),
        ("kvmerger", {}, ("grows", 1.05)),
        ("h2o", {}, ("evicts", 1.15)),
        ("elastic", {}, ("evicts", 1.15)),
        ("strided", {}, ("evicts", 1.15)),
        ("rkv", {}, ("plans every 128 steps", 1.15)),
        ("rkv", {"buffer": 1}, ("plans at each step", 1.15)),
        ("cam", {}, ("merges", 1.3)),
        ("kvmerger", {"decode": "merge", "every": "4"}, ("merges every 4 steps", 1.3)),
    ],
)
def test_what_a_method_may_cost_follows_from_its_policy(name: str, options: dict[str, str], kind: object) -> None:
    assert MethodCandidate.of(name, options, 64).kind == kind


# ---------------------------------------------------------------------- what is timed


def test_a_step_carries_its_part_of_what_comes_every_few_steps() -> None:
    steps = [1.0, 1.0, 10.0, 1.0, 1.0, 10.0, 1.0]
    assert step_s(steps, 1) == step_s(steps, 0) == 1
    assert step_s(steps, 3) == 4
    assert step_s(steps, 100) == sum(steps) / 7


@pytest.mark.parametrize(
    ("name", "late"), [("full", 0), ("h2o", 0), ("strided", 0), ("cam", 0), ("kvzip", 0), ("simlayerkv", 0)]
)
def test_plans_of_the_prompt_are_timed_and_those_of_decoding_are_not(
    name: str, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock ticks once per look, so that each plan takes one second: one for a layer, or for both together."""
    ticks = iter(range(1000))
    monkeypatch.setattr(timed_run, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    model, policy = TINY.shape.build(), MethodCandidate.of(name, {}, 64).policy
    prompt = draw_prompts(TINY.shape, 1, 300, 0)
    with torch.inference_mode(), mp.compress(model, policy, None if policy.keeps_all else "40%") as cache:
        watch = Stopwatch()
        with PlanClock(model, cache, watch) as clock:
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                cache=cache,
                streamer=watch,
                max_new_tokens=5,
                min_new_tokens=5,
                do_sample=False,
            )
        assert not any("_plan" in vars(layer_cache) for layer_cache in cache.layer_caches)
    assert (clock.plan_s, clock.late_s) == ({"full": 0, "simlayerkv": 1}.get(name, 2), late)
    assert clock.passes == (2 if name == "kvzip" else 1)


class Paced:
    """A course whose every turn takes what the clock of all of them says, times a factor."""

    def __init__(self, factor: float, clock: list[float], log: list[tuple[float, int]]) -> None:
        self._factor, self._clock, self._log = factor, clock, log

    def decode(self, steps: int) -> float:
        self._log.append((self._factor, steps))
        self._clock[0] *= 1.1  # a machine that gets slower with every turn
        return self._factor * self._clock[0]


def test_a_turn_is_compared_with_those_of_the_anchor_before_and_behind() -> None:
    """Of six methods at a time three stand between two turns of the anchor, whatever drifts over the whole race."""
    names = ["h2o", "ada", "tova", "rkv", "ems", "window"]
    candidates, _ = candidates_of(picked(*names, new_tokens=64))
    anchor, others = candidates[0], candidates[1:7]
    clock, log = [1.0], list[tuple[float, int]]()
    factors = {id(e): 1 + 0.5 * i for i, e in enumerate([anchor, *others])}
    courses: Any = {key: Paced(factor, clock, log) for key, factor in factors.items()}
    ratios = bench._race(replace(TINY, new_tokens=64), courses, anchor, others, random.Random(0))
    assert ratios[id(anchor)] == [1]
    turns = {e.name: len(ratios[id(e)]) for e in others}
    assert turns == {"h2o": 16, "ada": 16, "tova": 16, "rkv": 3, "ems": 8, "window": 16}
    for candidate in others:
        for ratio in ratios[id(candidate)]:
            assert ratio / factors[id(candidate)] == pytest.approx(1, abs=0.2)  # 1.1^2 from an anchor, at most
    places = [i for i, (factor, _) in enumerate(log) if factor == 1]
    assert places[0] == 0
    assert places[-1] == len(log) - 1
    assert max(b - a for a, b in pairwise(places)) <= 4
    assert {steps for _, steps in log} == {4}


def test_a_race_without_its_anchor_has_no_ratios() -> None:
    candidates, _ = candidates_of(picked("h2o"))
    candidates[0].failure = "gone"
    courses: Any = {id(candidates[1]): Paced(1.0, [1.0], [])}
    assert bench._race(TINY, courses, candidates[0], candidates[1:2], random.Random(0)) == {
        id(candidates[0]): [],
        id(candidates[1]): [],
    }


def test_a_method_that_fails_is_reported_and_the_others_go_on() -> None:
    data = bench.run(picked("streaming", "snapkv", budget="16"))
    streaming, snapkv, again = data["results"]
    assert again["failure"] == snapkv["failure"]
    assert len(streaming["readings"]) == 2
    assert streaming["decode_ratio"] is None
    assert streaming["decode_holds"] is None
    assert snapkv["failure"].startswith("BudgetError: ")
    text = methods_markdown({**data, "command": "test"})
    assert f"| `snapkv` | grows | {snapkv['failure']} |" in text
    assert "Failed: 1." in text


# ---------------------------------------------------------------------- the report


def candidate(name: str, *readings: tuple[float, float, float, float], **options: str) -> MethodCandidate:
    made = MethodCandidate.of(name, options, 64)
    made.readings = [MethodTiming(prefill, plan, decode, 1000, 1, ratio) for prefill, plan, decode, ratio in readings]
    return made


def test_medians_ratios_and_bounds() -> None:
    """The ratios of the readings count, not that of the medians, which may come of other seconds."""
    anchor = candidate("snapkv", (2, 0.1, 10, 1), (4, 0.1, 20, 1), (2, 0.2, 10, 1))
    slow = candidate("h2o", (3, 0.3, 12, 1.2), (3, 0.3, 36, 1.25), (9, 0.9, 99, 1.1)).as_dict(anchor)
    assert (slow["prefill_s"], slow["prefill_ratio"]) == (3, 1.5)
    assert slow["plan_share"] == pytest.approx(0.1)
    assert (slow["decode_ms"], slow["decode_ratio"], slow["decode_bound"]) == (36, 1.2, 1.15)
    assert slow["decode_ratio_range"] == [1.1, 1.25]
    assert (slow["plan_holds"], slow["decode_holds"]) == (False, False)
    own = anchor.as_dict(anchor)
    assert (own["plan_share"], own["plan_holds"]) == (0.05, True)
    assert (own["decode_ratio"], own["decode_holds"]) == (1, True)
    assert candidate("cam", (1, 0, 12, 1.2)).as_dict(anchor)["decode_holds"] is True
    assert candidate("full", (1, 0, 99, 9.9)).as_dict(anchor)["decode_holds"] is None


def test_a_course_goes_on_where_it_stopped() -> None:
    """Two rounds of nine tokens behind the first are what generate() makes in one go."""
    model, policy = TINY.shape.build(), MethodCandidate.of("h2o", {}, 64).policy
    prompt = draw_prompts(TINY.shape, 1, 60, 0)
    with TimedRun(model, policy, prompt, "50%") as course:
        course.prefill()
        turns = [course.decode(8), course.decode(8)]
        reading = course.reading([1.0, 1.5, 1.1])
        assert len(course._steps) == 16
        assert min(turns) <= course.decode_ms <= max(turns)
    with torch.inference_mode(), mp.compress(model, policy, "50%") as cache:
        once = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache=cache,
            max_new_tokens=19,
            min_new_tokens=19,
            do_sample=False,
        )
        assert course._ids.tolist() == once.tolist()
        assert reading.kv_bytes == cache.stats().kv_bytes
    assert (reading.passes, reading.ratio) == (1, 1.1)


@pytest.mark.parametrize(("every", "steps"), [("1", 8), ("5", 10), ("16", 16)])
def test_a_round_holds_what_comes_every_few_steps_equally_often(every: str, steps: int) -> None:
    model, policy = TINY.shape.build(), MethodCandidate.of("kvmerger", {"decode": "merge", "every": every}, 64).policy
    with TimedRun(model, policy, draw_prompts(TINY.shape, 1, 40, 0), "50%") as course:
        course.prefill()
        course.decode(8)
        assert len(course._steps) == steps


def test_the_command_writes_both_files(tmp_path: Path) -> None:
    arguments = ["--quick", "--methods", "h2o:recent=0.25,kvzip,fastgen", "--repeats", "1", "--new-tokens", "4"]
    result = CliRunner().invoke(app, ["bench", "methods", *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "methods-quick.json").read_text())
    rows = {row["name"]: row for row in data["results"] if not row["again"]}
    assert list(rows) == ["snapkv", "h2o", "kvzip", "fastgen"]
    assert not any("failure" in row for row in rows.values())
    assert rows["snapkv"]["prefill_ratio"] == rows["snapkv"]["decode_ratio"] == 1
    assert [rows[name]["extra_passes"] for name in rows] == [0, 0, 1, 0]
    full = 2 * 2 * 515 * 2 * 32 * 2  # layers x (key, value) x entries x KV heads x head_dim x bytes
    assert all(0.15 * full < row["kv_bytes"] < 0.35 * full for row in rows.values())
    assert all(0 < row["plan_share"] < 1 for row in rows.values())
    text = (tmp_path / "methods-quick.md").read_text()
    assert data["command"].startswith("millpond")
    assert data["hardware"] in text
    assert "here they check the machinery" in text
    assert "snapkv compared with itself is " in text
    assert "| `snapkv` | noise: the same once more |" in text
    assert "| `h2o:recent=0.25` | evicts |" in text
    assert "the prompt is repeated: 1 extra pass; 5 ids ask for the repetition |" in text
    assert "1 id is special, 32 of 512 are punctuation |" in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [("4x1024", "must read"), ("4x0x16/4x64", "must read"), ("4x64x6/4x16", "multiple"), ("4x64x8/4x15", "even")],
)
def test_shapes_that_cannot_be(text: str, reason: str) -> None:
    result = CliRunner().invoke(app, ["bench", "methods", "--shape", text])
    assert result.exit_code == 2
    assert reason in result.output


def test_a_shape_is_read() -> None:
    from millpond_lab.cli.bench.app import _shape

    assert _shape("4x1024x16/4x64") == MethodsPlan().shape
