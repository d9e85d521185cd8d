"""GGUF files of every architecture: the model is transformers' own, and what transformers leaves out is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.gguf.architectures import TYPES, write_architecture
from tests.helpers.gguf.files import write_gguf
from transformers import AutoModelForCausalLM

import millpond as mp
from millpond.errors import OptionError, UnsupportedModelError
from millpond.models.gguf.convert import supported_architectures
from millpond.models.load import load_model, load_tokenizer

#: Their attention is computed in their own code, which no cache can replace.
OWN_ATTENTION = ("falcon", "bloom")
#: A GGUF file's ids of special tokens, and what says where a configuration came from.
OF_THE_FILE = ("_name_or_path", "architectures", "dtype", "transformers_version", "tie_word_embeddings")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", TYPES)
def test_weights_configuration_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    written = write_architecture(path, name)
    model = load_model(path, "f32")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours, theirs = model.state_dict(), stock.state_dict()
    assert type(model) is type(stock)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert _differences(written.to_dict(), model.config.to_dict()) == {}
    assert load_tokenizer(path).decode(load_tokenizer(path).encode("then", add_special_tokens=False)) == "then"
    ids = torch.randint(300, (1, 40), generator=torch.Generator().manual_seed(0))
    wanted = stock.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0), wanted)  # type: ignore[operator]
    if name in OWN_ATTENTION:
        with pytest.raises(UnsupportedModelError, match="in its own code"), mp.compress(model, "full"):
            pass
        return
    with mp.compress(model, "full"):
        assert torch.equal(model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0), wanted)  # type: ignore[operator]


def _differences(written: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What the file said and the model's configuration does not; floats as near as float32 keeps them."""
    return {
        key: (value, found.get(key))
        for key, value in written.items()
        if key not in OF_THE_FILE and not key.endswith("token_id") and not _equal(value, found.get(key))
    }


def _equal(a: object, b: object) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6))


@pytest.mark.parametrize(
    ("name", "also", "more", "what"),
    [
        ("starcoder2", {"rope.freq_base": 100_000.0}, {}, r"rope.freq_base = 100000 \(it takes 10000\)"),
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {}, "rope.scaling.type = yarn"),
        ("gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {}, "rope.scaling.type = linear"),
        ("phi3", {"attention.sliding_window": 2047}, {}, r"attention.sliding_window = 2047 \(it takes None\)"),
        ("gemma2", {"attn_logit_softcapping": 20.0}, {}, r"attn_logit_softcapping = 20 \(it takes 50.0\)"),
        ("stablelm", {"attention.layer_norm_epsilon": 0.25}, {}, None),
        ("llama", {}, {"rope_freqs.weight": (8,)}, r"rope_freqs.weight: its 8 factors, 2 to 2, are not those"),
        ("qwen2", {"rope.dimension_count": 8}, {}, r"rope.dimension_count = 8 \(it rotates 16 numbers of each head\)"),
        ("qwen3", {}, {"blk.0.attn_q.bias": (512,)}, "the tensors blk.0.attn_q.bias"),
        ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}, None),
        ("llama", {}, {"blk.0.attn_rot_embd.weight": (8,)}, None),
    ],
)
def test_what_transformers_does_not_read_is_refused(
    name: str, also: dict[str, Any], more: dict[str, tuple[int, ...]], what: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "odd.gguf"
    write_architecture(path, name, also=also, more=more)
    if what is None:
        load_model(path)
        return
    with pytest.raises(OptionError, match=rf"odd.gguf: transformers .* does not read .*{what}.* use the model's safet"):
        load_model(path)


def test_a_name_that_misleads_transformers_is_no_damage(tmp_path: Path) -> None:
    """It reads a Llama file that is called just "mistral" as another type, of which the package gguf has no map."""
    write_architecture(tmp_path / "m.gguf", "llama", called="mistral")
    with pytest.raises(OptionError, match=r"m.gguf: transformers has no place for its tensors .* safetensors instead"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["t5", "umt5", "deci", "t5encoder"])
def test_what_is_no_decoder_is_refused_with_the_list(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", name, tokenizer=False)
    with pytest.raises(OptionError, match=rf"architecture '{name}', which .* it reads .*llama.* Use the model's safet"):
        load_model(tmp_path / "odd.gguf")


def test_every_architecture_that_is_tested_is_named() -> None:
    known = supported_architectures()
    assert {*TYPES} <= {*known}
    assert {"mamba", "lfm2", "qwen35", "gpt-oss", "minimax-m2", "gemma4"} <= {*known}
    assert not {"t5", "umt5", "deci"} & {*known}
