"""Plans that follow a load, and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.cluster.layout_file import load_plan
from millpond.cluster.replan import LoadShape
from millpond.errors import DataError
from millpond_lab.cluster_plan.place import watch


class EndError(Exception):
    """Ends a watch."""


def follow(loads: Sequence[list[tuple[int, int]] | DataError]) -> tuple[list[int], list[str]]:
    """Prompts that were planned for, and what was reported."""
    left, planned, said = list(loads), [], []

    def read() -> list[tuple[int, int]]:
        found = left.pop(0)
        if isinstance(found, DataError):
            raise found
        return found

    def wait() -> None:
        if not left:
            raise EndError

    with pytest.raises(EndError):
        watch(read, lambda lengths: planned.append(lengths[0][0]), wait, said.append)
    return planned, said


def test_only_another_load_is_planned_again() -> None:
    planned, said = follow([[(100, 10)], [(119, 9)], [(121, 10)], [(110, 10)], [(121, 20)]])
    assert planned == [100, 121, 121]  # 110 is within a fifth of 121
    assert said == ["The mean prompt went from 100 to 121 tokens.", "The mean answer went from 10 to 20 tokens."]


def test_small_changes_add_up() -> None:
    """The load is compared with that of the plan, not with what was read last."""
    planned, _ = follow([[(100, 10)], [(115, 10)], [(130, 10)]])
    assert planned == [100, 130]


def test_a_trace_that_is_being_written_leaves_the_plan() -> None:
    planned, said = follow([[(100, 10)], DataError("line 9 is no request"), [(200, 10)]])
    assert planned == [100, 200]
    assert said[0] == "The last plan stays: line 9 is no request"
    with pytest.raises(DataError):
        watch(lambda: (_ for _ in ()).throw(DataError("no")), lambda _: None, lambda: None, print)


def test_shorter_requests_are_another_load_too() -> None:
    assert LoadShape(100, 10).shift(LoadShape(79, 10)) is not None
    assert LoadShape(100, 10).shift(LoadShape(81, 12)) is None


def test_the_command_plans_for_the_newest_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "plan.json"
    rows = [f"2023-11-16 18:15:{n:02d}.0000000,400,5" for n in range(30)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n", encoding="utf-8")
    written: list[str] = []

    def sleep(seconds: float) -> None:
        assert seconds == 7
        written.append(out.read_text())
        if len(written) == 3:
            raise KeyboardInterrupt
        with trace.open("a", encoding="utf-8") as file:  # the newest 20: first half of them longer, then all
            file.writelines(f"2023-11-16 18:16:{10 * len(written) + n:02d}.0000000,1200,5\n" for n in range(10))

    monkeypatch.setattr("time.sleep", sleep)
    command = ["cluster", "plan", "--trace", f"azure:{trace}", "--devices", "1", "--requests", "10", "--seeds", "1"]
    result = CliRunner().invoke(
        app, [*command, "--slo", "ttft=1,tpot=1", "--watch", "7", "--newest", "20", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "The mean prompt went from 400 to 800 tokens." in result.output
    assert "The mean prompt went from 800 to 1,200 tokens." in result.output
    assert len(set(written)) == 3
    assert load_plan(str(out)).replicas == 1
    assert json.loads(written[0])["rows"][0]["goodput_per_device"] > 0
