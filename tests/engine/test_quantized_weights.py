"""An engine whose model's matrices are packed in 4 or 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import millpond as mp
from millpond.errors import OptionError, UnsupportedModelError
from millpond.kernels.quantized_weight import QuantizedWeight
from tests.helpers.hf.families import build, family

PROMPTS = [[5, 9, 44, 7], list(range(3, 60)), [70, 71, 72, 73, 74, 75, 76, 77, 78]]
GREEDY = mp.SamplingParams(max_tokens=12, temperature=0)


def saved(name: str, folder: Path) -> Path:
    wide = {"ffn_dim": 64} if name == "opt" else {"intermediate_size": 64, "tie_word_embeddings": name == "qwen3"}
    model = family(name).make(**(wide if name != "gpt2" else {}))
    model.save_pretrained(folder)
    return folder


def widened(folder: Path, bits: int) -> Any:
    """The model with each matrix as its codes say."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    packed: dict[int, torch.Tensor] = {}
    names = {id(model.get_output_embeddings().weight)}
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            names.add(id(module.weight))
    for weight in model.parameters():
        if id(weight) in names and id(weight) not in packed:
            packed[id(weight)] = weight
            weight.data = QuantizedWeight.quantize(weight.data, bits).widen()
    return model


def tokens(llm: mp.LLM) -> list[list[int]]:
    return [list(out.completions[0].token_ids) for out in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "gpt_neox"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("method", ["full", "h2o"])
def test_tokens_are_those_of_the_widened_model(name: str, weights: str, method: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / name)
    cache: dict[str, Any] = {"method": method, "budget": None if method == "full" else 16}
    plain = widened(folder, {"int8": 8, "int4": 4}[weights])
    with mp.LLM(plain, **cache) as llm:
        expected = tokens(llm)
    with mp.LLM(str(folder), tokenizer=None, weights=weights, **cache) as llm:
        assert tokens(llm) == expected
        assert tokens(llm) == expected  # and a second batch


def test_memory_of_the_modules_is_given_back(tmp_path: Path) -> None:
    with mp.LLM(str(saved("llama", tmp_path / "llama")), weights="int4") as llm:
        model = llm.engine._model.model
        assert all(module.weight.numel() == 0 for module in model.modules() if type(module) is torch.nn.Linear)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown format of weights 'int5'"):
        mp.EngineConfig(weights="int5")
    with pytest.raises(OptionError, match="runner='modules'"):
        mp.EngineConfig(weights="int4", runner="modules")
    with pytest.raises(OptionError, match="pass the model's name or folder"):
        mp.LLM(family("llama").make(), weights="int4")
    with pytest.raises(UnsupportedModelError, match="weights= needs a model that runs without its modules"):
        mp.LLM(str(saved("gpt2", tmp_path / "gpt2")), weights="int4")
    narrow = build(
        "LlamaConfig", "LlamaForCausalLM", vocab_size=96, hidden_size=40, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    narrow.save_pretrained(tmp_path / "narrow")
    with pytest.raises(UnsupportedModelError, match=r"groups of 32 numbers"):
        mp.LLM(str(tmp_path / "narrow"), weights="int4")
