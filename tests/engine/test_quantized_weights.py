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
from tests.helpers.gguf.files import write_gguf
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


@pytest.mark.covering
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


#: Kinds of blocks of a tiny file: all of one kind, and those that need 8 bits beside some of 4 in one layer.
FILES: dict[str, dict[str, Any]] = {
    "Q4_0": {"kind": "Q4_0"},
    "Q8_0": {"kind": "Q8_0"},
    "mixed": {
        "kind": "Q4_1",
        "kinds": {"attn_v": "Q8_0", "output.weight": "Q6_K", "ffn_gate": "Q8_0", "ffn_up": "Q4_0"},
    },
    "tied": {"kind": "Q4_1", "kinds": {"token_embd": "Q8_0"}, "leave_out": "output.weight"},
}


@pytest.mark.parametrize("name", FILES)
def test_tokens_of_a_gguf_file_are_those_of_its_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", tokenizer=False, **FILES[name])
    plain = mp.load_model(path, dtype="f32")
    if name == "mixed":  # this head has no blocks like ours
        weight = plain.get_output_embeddings().weight  # type: ignore[operator, union-attr]
        weight.data = QuantizedWeight.quantize(weight.data, 8).widen()
    with mp.LLM(plain, method="full") as llm:
        expected = tokens(llm)
    assert len({tuple(one) for one in expected}) == len(PROMPTS)
    disk = {"plan": mp.Plan(weights={"disk": 1.0}, slots=2), "disk": tmp_path}
    for options in ({}, disk):
        with mp.LLM(path, dtype="f32", method="full", weights="int4", **options) as llm:
            assert tokens(llm) == expected
            assert tokens(llm) == expected


def test_the_model_is_never_loaded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("llama", tmp_path / "llama")
    largest, quantize = [], QuantizedWeight.quantize

    def noted(weight: torch.Tensor, bits: int) -> QuantizedWeight:
        largest.append(weight.numel())
        return quantize(weight, bits)

    monkeypatch.setattr(QuantizedWeight, "quantize", noted)
    monkeypatch.setattr("millpond.engine.llm.load_model", lambda *_: pytest.fail("it was loaded whole"))
    monkeypatch.setattr("millpond.engine.offload.open.load_model", lambda *_: pytest.fail("it was loaded whole"))
    with mp.LLM(folder, weights="int4") as llm:
        model = llm.engine._model.model
        linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
        assert len(largest) == len(linears)
        assert max(largest) == max(module.weight.numel() for module in linears)
        held = [m.weight for m in linears if not m.weight.is_meta]
        assert all(weight.untyped_storage().nbytes() <= 4 for weight in held), "they have shapes only"


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_bytes_are_counted(weights: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "llama")
    with mp.LLM(folder, method="full") as llm:
        plain = llm.stats().weight_bytes
        assert plain == sum(weight.nbytes for weight in llm.engine._model.model.parameters())
        assert llm.plan is None
    with mp.LLM(folder, method="full", weights=weights) as llm:
        assert llm.plan is not None
        found = llm.stats().weight_bytes
        assert found == llm.plan.bytes["host"]["weights"]
        parts = [part.numel() for part in (llm.engine._model._streamed._kept[0].data,)]  # type: ignore[union-attr]
        assert found > sum(parts)
        assert f"weights {found / 2**20:,.1f} MiB" in str(llm.plan)


def test_rows_of_another_type(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "llama")
    plain = widened(folder, 4).to(torch.bfloat16)
    with mp.LLM(plain, method="full") as llm:
        assert llm.engine._model.dtype is torch.bfloat16
        expected = tokens(llm)
    with mp.LLM(folder, dtype="bf16", method="full", weights="int4") as llm:
        assert llm.engine._model.dtype is torch.bfloat16
        found = tokens(llm)
    same = sum(one == other for a, b in zip(found, expected, strict=True) for one, other in zip(a, b, strict=True))
    assert same >= 0.5 * sum(map(len, expected))  # codes are not rounded to bf16, and the other weights are


def test_a_model_without_safetensors_is_packed_after_it_was_loaded(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "llama")
    with mp.LLM(folder, method="full", weights="int4") as llm:
        expected = tokens(llm)
    torch.save(AutoModelForCausalLM.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with mp.LLM(folder, method="full", weights="int4") as llm:
        assert llm.plan is None
        assert tokens(llm) == expected
        model = llm.engine._model.model
        assert all(module.weight.numel() == 0 for module in model.modules() if type(module) is torch.nn.Linear)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown format of weights 'int5'"):
        mp.EngineConfig(weights="int5")
    with pytest.raises(OptionError, match="runner='modules'"):
        mp.EngineConfig(weights="int4", runner="modules")
    with pytest.raises(OptionError, match="pass the model's name or folder"):
        mp.LLM(family("llama").make(), weights="int4")
    with pytest.raises(
        UnsupportedModelError, match=r"GPT2LMHeadModel has no list of layers.*without memory= and weigh"
    ):
        mp.LLM(str(saved("gpt2", tmp_path / "gpt2")), weights="int4")
    with pytest.raises(OptionError, match="unknown dtype 'f8'"):
        mp.LLM(saved("llama", tmp_path / "llama"), weights="int4", dtype="f8")
    narrow = build(
        "LlamaConfig",
        "LlamaForCausalLM",
        vocab_size=96,
        hidden_size=40,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    narrow.save_pretrained(tmp_path / "narrow")
    with pytest.raises(UnsupportedModelError, match=r"groups of 32 numbers"):
        mp.LLM(str(tmp_path / "narrow"), weights="int4")
