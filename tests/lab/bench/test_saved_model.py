"""Trained weights in the place of random ones in `bench generate` and `bench engines`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.errors import OptionError
from millpond_lab.bench.engines import candidates
from millpond_lab.bench.engines.candidates import Weights
from millpond_lab.bench.generate.candidates import ModelShape, draw_prompts
from millpond_lab.bench.generate.saved_model import SavedModel

ENGINES = Path(__file__).parents[3] / "benchmarks" / "engines"
SHAPE = ModelShape(layers=1, width=64, heads=2, kv_heads=1, head_dim=32, ffn=32, vocab=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model as a user has it."""
    SHAPE.build(3).save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


def test_the_weights_of_the_folder_are_what_every_engine_gets(folder: Path, tmp_path: Path) -> None:
    saved = SavedModel.of(str(folder))
    assert (saved.vocab, saved.gguf, saved.config()["name"]) == (64, None, "mine")
    assert saved.weight_bytes() == SHAPE.weight_bytes()
    weights = Weights(saved, 0, tmp_path / "models")
    given = AutoModelForCausalLM.from_pretrained(weights.saved())
    for name, tensor in SHAPE.build(3).named_parameters():
        assert torch.equal(given.get_parameter(name), tensor)
    SHAPE.build(4).save_pretrained(folder)
    assert Weights(SavedModel.of(str(folder)), 0, tmp_path / "models").root != weights.root


def test_a_name_without_weights_on_this_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), "nobody/nothing"):
        with pytest.raises(OptionError, match=r"config\.json and safetensors"):
            SavedModel.of(name)


def test_llama_cpp_gets_the_gguf_file_as_it_is() -> None:
    gguf = Path("some-Q4_1.gguf")
    converted, as_it_is = candidates.llamacpp(Path("python"), gguf)
    assert as_it_is.kind.model(Weights(SHAPE, 0, Path("nowhere"))) == gguf
    assert (converted.setting, as_it_is.setting) == ("full", "full, weights of some-Q4_1.gguf")


@pytest.mark.slow
def test_bench_generate_runs_on_it(folder: Path, tmp_path: Path) -> None:
    command = ["bench", "generate", "--model", str(folder), "--quick", "--cells", "1x200", "--repeats", "1"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "generate-quick.json").read_text())
    assert data["model"]["name"] == "mine"
    assert data["model"]["weights_sha256"][:12] in (tmp_path / "generate-quick.md").read_text()
    assert not [row for row in data["results"] if "failure" in row or not row["decode_ms"]]
    refused = CliRunner().invoke(app, [*command, "--kvpress", "python"])
    assert refused.exit_code == 2
    assert "leave it out with --model" in refused.output + refused.stderr


def test_transformers_own_child_decodes_as_generate_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ENGINES))
    child: Any = importlib.import_module("transformers_engine")
    monkeypatch.setattr(child.torch, "set_num_threads", lambda n: None)
    engine = child.Transformers({"model": str(folder), "threads": 1, "step_tokens": 60})
    tokens: list[torch.Tensor] = []
    inner = engine._pass
    monkeypatch.setattr(engine, "_pass", lambda *given: (tokens.append(inner(*given)), tokens[-1])[1])
    prompts = draw_prompts(SHAPE, 3, 50, 0)
    answer = engine.run(prompts.tolist(), 5)
    expected = SHAPE.build(3).generate(prompts, do_sample=False, max_new_tokens=6, min_new_tokens=6, pad_token_id=0)
    assert torch.equal(torch.cat(tokens[-6:], 1), expected[:, 50:])
    assert len(answer["steps_ms"]) == 5
    assert answer["kv_bytes"] == 3 * 55 * 2 * 32 * 2  # sequences x entries x (key, value) x head_dim x bytes
