"""Runs of codecs that were calibrated: the folder says with which file, and goes on with no other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from millpond.errors import DataError, OptionError
from millpond.hf.calibration.measure import calibrate
from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.run import run
from millpond_lab.evals.spec import parse_specs
from millpond_lab.evals.task import TASKS, task
from tests.helpers.evals.small import WORDS, TinyTask, tiny_samples, tiny_tokenizer
from tests.helpers.hf.families import build


@pytest.fixture(autouse=True)
def tiny_task() -> Iterator[None]:
    TASKS.names()

    @task("tiny")
    def tiny() -> TinyTask:
        """Answers by decoding."""
        return TinyTask(items=tiny_samples(2))

    yield
    del TASKS._entries["tiny"]


@cache
def model() -> PreTrainedModel:
    return build(
        "LlamaConfig",
        "LlamaForCausalLM",
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
    )


def calibration(path: Path, seed: int) -> str:
    ids = torch.randint(2, 90, (300,), generator=torch.Generator().manual_seed(seed))
    calibrate(model(), ids, windows=1, length=256, fisher=False).save(path)
    return str(path)


def go(folder: Path, codecs: str, file: str | None = None) -> list[SummaryRow]:
    plan = EvalPlan(
        "tiny",
        parse_specs("full", "method"),
        parse_specs("tiny", "tasks"),
        codecs=codecs.split(","),
        samples=2,
        calibration=file,
    )
    return run(plan, model(), tiny_tokenizer(), folder)


def said(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())["calibration"]


def test_a_run_says_which_calibration_it_used(tmp_path: Path) -> None:
    file = calibration(tmp_path / "one.safetensors", 1)
    rows = go(tmp_path / "out", "int4,kvquant4", file)
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert said(tmp_path / "out") == {
        "file": "one.safetensors",
        "sha256": digest,
        "model": "LlamaForCausalLM",
        "bits": [2, 3, 4],
        "outliers": 0.01,
        "sinks": 1,
    }
    assert digest in (tmp_path / "out" / "summary.md").read_text()
    assert go(tmp_path / "out", "int4,kvquant4", file) == rows


def test_another_calibration_needs_another_folder(tmp_path: Path) -> None:
    one, two = (calibration(tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2))
    out = tmp_path / "out"
    go(out, "kvquant4", one)
    begun = (out / "samples.jsonl").read_bytes()
    with pytest.raises(OptionError, match=r"with calibration 1\.safetensors .*this one has 2\.safetensors"):
        go(out, "kvquant4", two)
    # under another name it is still the same
    moved = Path(one).rename(tmp_path / "moved.safetensors")
    go(out, "kvquant4", str(moved))
    assert (out / "samples.jsonl").read_bytes() == begun
    assert said(out)["file"] == "1.safetensors"


def test_calibrated_codecs_can_be_added_and_others_need_none(tmp_path: Path) -> None:
    one, two = (calibration(tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2))
    out = tmp_path / "out"
    go(out, "int4", one)
    assert said(out) is None
    go(out, "kvquant4", two)
    go(out, "int8")
    assert said(out)["file"] == "2.safetensors"
    with pytest.raises(OptionError, match="another folder"):
        go(out, "kvquant3", one)


def test_a_folder_that_does_not_say_is_not_gone_on_with(tmp_path: Path) -> None:
    file, out = calibration(tmp_path / "one.safetensors", 1), tmp_path / "out"
    go(out, "kvquant4", file)
    found = json.loads((out / "run.json").read_text())
    del found["calibration"]
    (out / "run.json").write_text(json.dumps(found))
    with pytest.raises(OptionError, match="an unknown calibration"):
        go(out, "kvquant4", file)
    (tmp_path / "torn").write_bytes(b"\x00" * 20)
    with pytest.raises(DataError, match="cannot be read"):
        go(out, "kvquant4", str(tmp_path / "torn"))
