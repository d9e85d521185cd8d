"""GGUF files written of known models by llama.cpp's rules: the model that is loaded is the one that was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.gguf.files import write_gguf
from tests.helpers.gguf.known import KNOWN, known_model, write_known
from transformers import AutoConfig, AutoModelForCausalLM

import millpond as mp
from millpond.errors import OptionError, UnsupportedModelError
from millpond.models.load import load_model

#: One of each pair is computed from the other, as `w + 1` and back, so the last bit may differ.
SHIFTED = ("qwen35", "qwen35moe")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["lfm2", "mamba", "qwen35", "qwen35moe", "minimax-m2"])
def test_it_is_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    """Tensors are transformers' own bit by bit, logits and tokens those of the model before it was written."""
    written = known_model(name)
    write_known(tmp_path / "k.gguf", name, written)
    model = load_model(tmp_path / "k.gguf", "f32")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="k.gguf", dtype=torch.float32)
    ours, theirs, first = model.state_dict(), stock.state_dict(), written.state_dict()
    assert ours.keys() == theirs.keys() == first.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    rounding = 2**-23 if name in SHIFTED else 0.0
    assert max(float((ours[key] - first[key]).abs().max()) for key in ours) <= rounding
    ids = torch.randint(290, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, wanted = model(ids).logits, written(ids).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = written.generate(ids, **options)  # type: ignore[operator]
    assert torch.equal(model.generate(ids, **options), tokens)  # type: ignore[operator]
    if name == "mamba":
        with pytest.raises(UnsupportedModelError), mp.compress(model, "full"):
            pass
        return
    with mp.compress(model, "full"):
        assert torch.equal(model.generate(ids, **options), tokens)  # type: ignore[operator]


def test_every_known_architecture_is_tested() -> None:
    assert {*KNOWN} == {"lfm2", "mamba", "qwen35", "qwen35moe", "minimax-m2", "gpt-oss", "gemma4"}


def test_gpt_oss_is_refused_as_long_as_transformers_reads_it_wrongly(tmp_path: Path) -> None:
    write_known(tmp_path / "k.gguf", "gpt-oss", known_model("gpt-oss"))
    with pytest.raises(OptionError, match=r"does not read its experts, .* nor the scaling of its positions, so"):
        load_model(tmp_path / "k.gguf")
    with pytest.raises(TypeError, match="0-dimensional"):  # else transformers was mended: read it, and test it above
        AutoConfig.from_pretrained(tmp_path, gguf_file="k.gguf")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, r"embedding_length_per_layer_input = 0 \(it takes 256\)"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30 \(it takes None\)"),
        (
            {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3},
            r"attention.shared_kv_layers = 2 \(it takes 0\)",
        ),
    ],
)
def test_gemma_4_is_refused_where_transformers_takes_its_defaults(
    options: dict[str, object], why: str, tmp_path: Path
) -> None:
    """They are numbers of no published model: E2B shares layers, and larger ones have no inputs for each layer."""
    written = known_model("gemma4", **options)
    write_known(tmp_path / "k.gguf", "gemma4", written)
    with pytest.raises(OptionError, match=rf"k.gguf: transformers .* does not read .*{why}"):
        load_model(tmp_path / "k.gguf")
    found = AutoConfig.from_pretrained(tmp_path, gguf_file="k.gguf")
    assert found.hidden_size_per_layer_input == 256
    assert found.num_kv_shared_layers == 0
    assert found.final_logit_softcapping is None


def test_mistral_has_no_names_of_tensors(tmp_path: Path) -> None:
    """llama.cpp writes Mistral's models as "llama"; a file that says "mistral" is refused by its reader too."""
    write_gguf(tmp_path / "m.gguf", "mistral")
    with pytest.raises(OptionError, match=r"m.gguf: transformers has no place for its tensors .*mistral"):
        load_model(tmp_path / "m.gguf")


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    """Of architectures that transformers maps by rules of their own, too."""
    written = known_model("lfm2")
    write_known(tmp_path / "k.gguf", "lfm2", written, more={"blk.1.attn_q.bias": torch.ones(64)})
    with pytest.raises(OptionError, match=r"does not read the tensors model.layers.1.self_attn.q_proj.bias, so"):
        load_model(tmp_path / "k.gguf")
