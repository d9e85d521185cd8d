"""`mp.plan` and `millpond plan`: a plan of a real folder, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import millpond as mp
from millpond.cli.app import app
from millpond.engine.offload import planner
from millpond.engine.offload.model_size import model_size
from millpond.engine.offload.plan import from_json, load_plan
from millpond.engine.offload.planner import EXAMPLE
from millpond.errors import BudgetError, DataError, OptionError
from millpond.models.load import resolve


def make(**options: Any) -> mp.Plan:
    usual = {"memory": "64MiB", "prompt_tokens": 256, "new_tokens": 64, "budget": 64, "machine": EXAMPLE}
    return mp.plan(options.pop("model", "pond-recall"), **{**usual, **options})


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "120"})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Constants without a measurement; whether each was to be measured again."""
    calls: list[bool] = []

    def machine_constants(folder: Path, *, again: bool, report: Any, file: Path | None = None) -> Any:
        calls.append(again)
        return EXAMPLE

    monkeypatch.setattr(planner, "machine_constants", machine_constants)
    return calls


def test_a_model_that_fits_stays_in_memory() -> None:
    found = make()
    assert found.weights == {"host": 1.0}
    assert found.prediction is not None
    assert found.prediction.total("disk") == 0
    assert set(found.prediction.what_if) == {"twice the memory", "an int4 cache"}


def test_of_a_model_that_does_not_fit_layers_are_read(tmp_path: Path) -> None:
    found = make(memory=21 * 2**20, disk=tmp_path, machine=EXAMPLE)
    assert found.prediction is not None
    assert "twice the disk bandwidth" in found.prediction.what_if
    small = make(memory=20 * 2**20, disk=tmp_path)
    assert small.share("weights", "disk") > 0
    assert small.prediction is not None
    assert small.prediction.total("host") <= 20 * 2**20


def test_the_engine_runs_what_was_planned(tmp_path: Path) -> None:
    memory = 20 * 2**20
    found = make(memory=memory, disk=tmp_path)
    assert found.prediction is not None
    with mp.LLM("pond-recall", memory=memory, plan=found, method="h2o", budget=64) as llm:
        prompts = [[5 + i % 600 for i in range(first, first + 256)] for first in range(found.block or 1)]
        out = llm.generate(prompts, mp.SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
        assert [len(one.completions[0].token_ids) for one in out] == [64] * len(prompts)
        assert llm.plan is not None
        counted, planned = llm.plan.bytes["host"], found.prediction.bytes["host"]
        for purpose in ("activations", "logits", "slots"):
            assert counted.get(purpose, 0) == planned.get(purpose, 0)
        assert counted["weights"] == planned.get("weights", 0) + planned["embeddings and head"]
        assert counted["kv"] >= planned["kv"]
        assert sum(counted.values()) <= memory


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory": "1MiB"}, BudgetError, r"below the smallest that runs, [\d,]+ bytes.*or a disk for the weights"),
        ({"memory": "soon"}, BudgetError, "soon"),
        ({"disk": "/nowhere/at/all"}, OptionError, "there is no such folder"),
        ({"model": "/nowhere/at/all"}, OptionError, "/nowhere/at/all: there is no such folder"),
        ({"prompt_tokens": 0}, OptionError, "prompt_tokens=0 must be"),
        ({"new_tokens": True}, OptionError, "new_tokens=True must be"),
        ({"prompt_tokens": 10**6}, OptionError, "more than the model's context"),
        ({"latency_s": 0}, OptionError, "latency_s=0 must be more than 0"),
        ({"latency_s": 1e-9}, BudgetError, "the quickest plan takes"),
        ({"method": "h20"}, OptionError, "did you mean 'h2o'"),
        ({"codec": "kvquant4"}, OptionError, "needs a calibration"),
        ({"method": "kvzip"}, OptionError, "lets the model repeat each prompt"),
        ({"budget": 1}, BudgetError, "budget"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


def test_a_folder_without_weights_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    source = Path(resolve("pond-recall"))
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(OptionError, match="safetensors"):
        make(model=tmp_path)
    content = (source / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:1000])
    with pytest.raises(DataError):
        make(model=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert make(model=tmp_path).model == make().model == model_size("pond-recall").fingerprint


def test_nothing_is_measured_for_what_is_refused(measured: list[bool]) -> None:
    with pytest.raises(BudgetError):
        make(memory="1MiB", machine=None)
    assert measured == []
    make(machine=None)
    make(machine=None, measure=True)
    assert measured == [False, True]


@pytest.mark.usefixtures("measured")
def test_the_command_shows_the_plan(tmp_path: Path) -> None:
    shown = run("--memory", "21MiB", "--disk", str(tmp_path), "--prompt", "256", "--new", "64", "--budget", "64")
    assert shown.exit_code == 0, shown.output
    for text in (
        "weights",
        "KV",
        "activations",
        "host",
        "prefill",
        "decode",
        "bound by",
        "twice the memory",
        "an int4 cache",
    ):
        assert text in shown.output


@pytest.mark.usefixtures("measured")
def test_the_command_prints_and_writes_json(tmp_path: Path) -> None:
    options = ("--memory", "21MiB", "--disk", str(tmp_path), "--prompt", "256", "--new", "64", "--budget", "64")
    shown = run(*options, "--json", "--out", str(tmp_path / "plan.json"))
    assert shown.exit_code == 0, shown.output
    plan = from_json(json.dumps(json.loads(shown.stdout)))
    assert load_plan(tmp_path / "plan.json") == plan
    assert plan.model == model_size("pond-recall").fingerprint


def test_the_command_says_what_is_wrong() -> None:
    shown = run("--memory", "1MiB")
    assert shown.exit_code == 2
    assert "below the smallest that runs" in " ".join(shown.output.split())
