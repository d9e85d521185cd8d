"""benchmarks/quality/quality.sh: its commands, with programs that only write down their arguments."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.methods import METHODS
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.run import run
from millpond_lab.evals.peers.run import PeerPlan
from millpond_lab.evals.report.claims import CLAIMS
from millpond_lab.evals.report.kvpress_equivalents import ALIKE, PRESSES
from millpond_lab.evals.spec import parse_specs, words
from millpond_lab.evals.task import TASKS, task
from tests.helpers.evals.small import TinyTask, tiny_model, tiny_samples, tiny_tokenizer

ROOT = Path(__file__).parents[3]
PROGRAM = '#!/bin/sh\n{ echo "$(basename "$0")"; printf "%s\\n" "$@"; echo; } >> "$LOG"\n'


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs that append their names and arguments to $LOG."""
    for name in ("millpond", "python"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(PROGRAM, encoding="utf-8")
        path.chmod(0o755)
    return path.parent


def called(programs: Path, *parts: str, **variables: str) -> list[list[str]]:
    """The calls that the script makes: program and arguments."""
    log = programs / "log"
    log.unlink(missing_ok=True)
    known = {"PATH": os.environ["PATH"], "BIN": str(programs), "LOG": str(log), "OUT": str(programs / "out")}
    script = str(ROOT / "benchmarks" / "quality" / "quality.sh")
    subprocess.run([script, *parts], env={**known, **variables}, check=True, capture_output=True, text=True)
    return [call.splitlines() for call in log.read_text(encoding="utf-8").strip().split("\n\n")]


#: Methods without trained networks that come along.
UNTRAINED = {"kvzap", "fastkvzip"}


def option(call: list[str], name: str) -> str:
    return call[call.index(f"--{name}") + 1]


def test_the_curves_are_those_of_every_method(programs: Path) -> None:
    aware, agnostic = called(programs, "curves")
    assert [option(call, "protocol") for call in (aware, agnostic)] == ["aware", "agnostic"]
    assert [option(call, "out") for call in (aware, agnostic)] == [
        f"{programs}/out/curves-{p}" for p in ("aware", "agnostic")
    ]
    named = words(option(aware, "method"), "method")
    assert named[:3] == ["full", "oracle", "window"]
    assert words(option(agnostic, "method"), "method") == [name for name in named if name != "oracle"]
    assert {name.partition(":")[0] for name in named} == {*METHODS.names(), "oracle"} - {"minference", *UNTRAINED}
    plan = EvalPlan(
        "m",
        parse_specs(option(aware, "method"), "method"),
        parse_specs(option(aware, "tasks"), "tasks"),
        words(option(aware, "budget"), "budget"),
        samples=int(option(aware, "samples")),
    )
    assert len(plan.built) == 4
    assert plan.samples == 40
    assert len(plan.cells()) == 4 * (1 + 4 * (len(named) - 1))
    for spec in plan.methods[2:]:  # all after the references have room in the smallest budget of a short prompt
        spec.build(METHODS).protect.check(48)


def test_every_pair_that_is_claimed_is_run(programs: Path) -> None:
    (aware, _) = called(programs, "curves")
    at_bytes = called(programs, "bytes")[0]
    named = words(f"{option(aware, 'method')},{option(at_bytes, 'method')}", "method")
    assert {name for claim in CLAIMS for pair in claim.pairs for name in pair} <= {*named}
    assert {*ALIKE} <= {*named}


def test_every_counterpart_is_asked(programs: Path) -> None:
    aware, agnostic = called(programs, "curve-peers")
    presses = option(aware, "method")
    assert {*PRESSES.values()} <= {*words(presses, "method")}
    assert presses == option(agnostic, "method")
    assert {*PRESSES} <= {*METHODS.names()}
    ours = called(programs, "curves")[0]
    for name in ("tasks", "budget", "samples", "seed", "out"):
        assert option(aware, name) == option(ours, name)
    plan = PeerPlan("m", parse_specs(presses, "method"), parse_specs(option(aware, "tasks"), "tasks"), ["5%"], peer="x")
    assert len(plan.cells()) == 4 * len(words(presses, "method"))


def test_the_lists_can_be_others(programs: Path) -> None:
    (call,) = called(programs, "curves", TASKS="recall", CURVE_METHODS="h2o", VARIANTS="", PROTOCOLS="agnostic")
    assert (option(call, "tasks"), option(call, "method")) == ("recall", "full,h2o")


def test_an_unknown_part_is_refused(programs: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        called(programs, "curve")
    assert error.value.returncode == 2
    assert "no part called curve;" in error.value.stderr


@pytest.fixture
def two_tasks() -> Iterator[tuple[str, str]]:
    TASKS.names()

    @task("first")
    def first() -> TinyTask:
        """Three samples."""
        return TinyTask(items=tiny_samples(3))

    @task("second")
    def second() -> TinyTask:
        """Others."""
        return TinyTask(items=tiny_samples(6, new=4)[3:])

    yield "first", "second"
    for name in ("first", "second"):
        del TASKS._entries[name]


def test_parts_are_put_together_as_if_they_were_one(programs: Path, tmp_path: Path, two_tasks: tuple[str, str]) -> None:
    def go(folder: str, tasks: str, **other: Any) -> Any:
        plan = EvalPlan("tiny", parse_specs("full,h2o", "method"), parse_specs(tasks, "tasks"), ["30%"], samples=3)
        return run(plan, tiny_model(), tiny_tokenizer(), tmp_path / folder / "curves-aware", **other)

    for name in two_tasks:
        go(name, name)
    parts = " ".join(str(tmp_path / name) for name in two_tasks)
    (ours, theirs) = called(programs, "curve-merge", PARTS=parts, OUT=str(tmp_path / "one"), PROTOCOLS="aware")
    assert (ours[1], theirs[1]) == ("eval", "eval-peer")

    def nobody(cell: object) -> Any:
        class Silent:
            def examine(self, batch: object) -> Any:
                raise AssertionError(f"{cell} is asked again")

        return Silent()

    assert go("one", ",".join(two_tasks), examiner=nobody) == go("whole", ",".join(two_tasks))


def test_the_orderings_are_made_of_curves_needles_and_text(programs: Path) -> None:
    (call,) = called(programs, "orderings")
    out = f"{programs}/out"
    assert call == [
        "python",
        "benchmarks/quality/orderings.py",
        f"{out}/curves-aware",
        f"{out}/needles-aware",
        f"{out}/curves-agnostic",
        f"{out}/needles-agnostic",
        f"{out}/pairs-text",
        "--out",
        f"{out}/orderings.json",
    ]
