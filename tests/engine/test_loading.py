"""Loading: no weight is held twice, none is copied before passes pay for it, and answers stay what they were."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.models.load import load_model
from millpond.runner import native_forward
from millpond_lab.bench.common.machine import PeakMemory
from tests.helpers.hf.families import family
from tests.helpers.models import REAL, needs_real_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "performance" / "loading.py"
ASK = mp.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = list(range(3, 40))
#: Bytes of a process beside weights while a small model is loaded: objects of transformers, tensors of the trial.
BESIDE = 40 * 2**20
#: What a model of up to half a billion parameters may take.
MOST_MB, MOST_S = 1600, 2.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what of a file is in memory")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    family("qwen2").make(tie_word_embeddings=False).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_forward, "PASSES_IN_FILE", 2)


def tokens(llm: mp.LLM) -> list[int]:
    return list(llm.generate(PROMPT, ASK)[0].completions[0].token_ids)


def places(model: Any) -> list[int]:
    return [weight.data_ptr() for weight in model.parameters()]


def moved(model: Any, before: list[int]) -> set[str]:
    """Last but one parts of the names of the weights that lie elsewhere now."""
    names = [name.split(".")[-2] for name, _ in model.named_parameters()]
    return {name for name, old, new in zip(names, before, places(model), strict=True) if old != new}


def test_a_short_answer_copies_no_weight(folder: Path) -> None:
    with mp.LLM(folder, method="full") as llm:
        before = places(llm.engine._model.model)
        tokens(llm)
        assert moved(llm.engine._model.model, before) == set()


@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_leave_the_file_after_some_passes(folder: Path, early: None, deterministic: bool) -> None:
    with mp.LLM(folder, method="full", deterministic=deterministic) as llm:
        model, forward = llm.engine._model.model, llm.engine._model._lean
        assert forward is not None
        before, first = places(model), tokens(llm)
        assert moved(model, before) >= {"lm_head", "q_proj", "down_proj"}
        assert "embed_tokens" not in moved(model, before)
        assert all(block.up.whole is not None for block in forward._decoder.blocks)
        settled = places(model)
        assert tokens(llm) == first
        assert places(model) == settled
        assert forward.ready()
        assert llm.engine._model.runner == "lean"


def test_weights_that_another_engine_reads_stay_where_they_are(folder: Path, early: None) -> None:
    """It would find them moved, and go through the modules."""
    model = load_model(folder)
    before = places(model)
    with mp.LLM(model, method="full") as one, mp.LLM(model, method="full") as other:
        assert tokens(one) == tokens(other)
        assert moved(model, before) == set()
        assert all(llm.engine._model._lean.ready() for llm in (one, other))  # type: ignore[union-attr]
    del other
    gc.collect()
    tokens(one)
    assert "lm_head" in moved(model, before)


def test_a_hook_that_comes_while_weights_move_is_heard(folder: Path, early: None) -> None:
    with mp.LLM(folder, method="full") as llm:
        model, expected = llm.engine._model.model, tokens(llm)
        calls: list[int] = []
        model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
        assert tokens(llm) == expected
        assert calls


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 155 MB, of which embeddings and head take 61 each, and a text reads a few rows of the former."""
    folder = tmp_path_factory.mktemp("large")
    made = family("qwen2").make(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=4, vocab_size=60_000, tie_word_embeddings=False
    )
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("passes", [0, 64])
def test_the_peak_is_one_copy_of_the_weights(large: Path, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_forward, "PASSES_IN_FILE", passes)
    with mp.LLM("pond-recall", method="full") as other:  # what is loaded at first use
        tokens(other)
    memory = PeakMemory()
    with mp.LLM(large, method="full") as llm:
        tokens(llm)
        weights = llm.engine._model.weight_bytes
        embeddings = llm.engine._model.model.model.embed_tokens.weight.nbytes
    growth = memory.growth()
    if growth is None:
        pytest.skip("the system does not tell how much memory a process holds")
    assert growth <= weights - embeddings + BESIDE


@needs_real_model
@pytest.mark.slow
def test_a_real_model_stays_within_its_bounds() -> None:
    """The least of three runs: other jobs on the machine lengthen what is counted."""
    command = [sys.executable, str(SCRIPT), str(REAL), "--only", "LLM", "--runs", "1"]
    bounds = ["--most-s", str(MOST_S), "--most-mb", str(MOST_MB)]
    told = ""
    for _ in range(3):
        run = subprocess.run([*command, *bounds], stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode == 0:
            return
        told += run.stdout
    pytest.fail(told)
