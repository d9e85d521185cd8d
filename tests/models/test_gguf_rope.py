"""Rotary scaling of GGUF files: factors in tensors become parameters, and the logits are those of such a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.gguf.architectures import write_architecture
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import millpond as mp
from millpond.errors import DataError, OptionError
from millpond.models.gguf.header import read_header
from millpond.models.gguf.rope import FREQS, LONG, SHORT, take_rope
from millpond.models.load import load_model

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))


def llama_factors(theta: float, dim: int, factor: float, before: int = 8192) -> np.ndarray:
    """What llama.cpp writes for a model of Llama 3.1 or later: 1 for short waves, `factor` for long ones."""
    factors = []
    for index in range(dim // 2):
        wave = 2 * math.pi * theta ** (2 * index / dim)
        share = min(max((before / wave - 1) / (4 - 1), 0), 1)
        factors.append(1 / ((1 - share) / factor + share))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize(("factor", "before", "dim"), [(8.0, 8192, 16), (32.0, 8192, 64), (4.0, 1024, 32)])
def test_factors_of_llama_are_its_parameters(factor: float, before: int, dim: int, tmp_path: Path) -> None:
    """Logits of positions 0 to 3,000 are those of transformers' own Llama with that configuration."""
    factors = llama_factors(500_000.0, dim, factor, before)
    assert 1 < factors[np.abs(factors - factor / 2).argmin()] < factor  # one of them is between the two
    options = {"head_dim": dim, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
    also = {} if before == 8192 else {"rope.scaling.original_context_length": before}
    write_architecture(tmp_path / "l.gguf", "llama", also=also, more={FREQS: factors}, options=options)
    model = load_model(tmp_path / "l.gguf", "f32")
    unscaled = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="l.gguf", dtype=torch.float32)
    rope = LLAMA3 | {"factor": factor, "original_max_position_embeddings": before, "rope_theta": 500_000.0}
    assert model.config.rope_parameters == rope
    config = LlamaConfig(**unscaled.config.to_dict() | {"rope_parameters": dict(rope)})
    stock = LlamaForCausalLM(config).eval()
    stock.load_state_dict(unscaled.state_dict())
    ids = torch.randint(300, (1, 3000), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, wanted, without = (run(ids).logits for run in (model, stock, unscaled.eval()))
        with mp.compress(model, "full") as kv:
            ours = model(ids, cache=kv).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert (without - wanted).abs().max() > 1e-3 * wanted.abs().max()


@pytest.mark.parametrize(("dim", "factor"), [(128, 8.0), (64, 32.0)])
def test_factors_of_the_published_models(dim: int, factor: float, tmp_path: Path) -> None:
    """Llama 3.1 8B and 70B; Llama 3.2 1B."""
    options = {"head_dim": dim, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
    config = write_architecture(
        tmp_path / "l.gguf", "llama", more={FREQS: llama_factors(500_000.0, dim, factor)}, options=options
    )
    assert take_rope(tmp_path / "l.gguf", read_header(tmp_path / "l.gguf"), config) == ((FREQS,), ())
    assert config.rope_parameters["factor"] == factor


def test_factors_of_one_change_nothing(tmp_path: Path) -> None:
    write_architecture(tmp_path / "l.gguf", "llama", more={FREQS: np.ones(8, dtype=np.float32)})
    assert load_model(tmp_path / "l.gguf").config.rope_parameters["rope_type"] == "default"


def _changed(index: int, by: float) -> np.ndarray:
    factors = llama_factors(10_000.0, 16, 8.0)
    factors[index] *= by
    return factors


@pytest.mark.parametrize(
    "factors",
    [
        _changed(0, 1.0001),
        _changed(-2, 1.0001),
        _changed(-1, 1.5),
        llama_factors(10_000.0, 16, 8.0, 4096),
        llama_factors(10_000.0, 32, 8.0),
    ],
)
def test_factors_of_another_kind_are_refused_with_the_reason(factors: np.ndarray, tmp_path: Path) -> None:
    write_architecture(tmp_path / "l.gguf", "llama", more={FREQS: factors})
    with pytest.raises(
        OptionError, match=rf"its {len(factors)} factors, 1 to .*, are not those of Llama 3 .* 8192\), so"
    ):
        load_model(tmp_path / "l.gguf")


def test_factors_in_another_type_are_refused(tmp_path: Path) -> None:
    write_architecture(tmp_path / "l.gguf", "llama", more={FREQS: np.ones(8, dtype=np.float16)})
    with pytest.raises(DataError, match=r"tensor 'rope_freqs.weight' is of the type F16; F32 is expected"):
        load_model(tmp_path / "l.gguf")


def _phi3(path: Path, also: dict[str, Any], n: int = 8) -> tuple[list[float], list[float]]:
    short, long = (np.linspace(1, top, n).astype(np.float32) for top in (1.25, 40))
    write_architecture(path, "phi3", also=also, more={SHORT: short, LONG: long})
    return short.tolist(), long.tolist()


@pytest.mark.parametrize("rotated", [16, 12])
def test_factors_of_longrope(rotated: int, tmp_path: Path) -> None:
    """Short ones up to the length of training, long ones beyond it; three quarters of a head, as in Phi-4-mini."""
    also = {
        "rope.scaling.original_context_length": 256,
        "rope.scaling.attn_factor": 1.19,
        "context_length": 4096,
        "rope.dimension_count": rotated,
    }
    short, long = _phi3(tmp_path / "p.gguf", also, rotated // 2)
    model = load_model(tmp_path / "p.gguf", "f32")
    config = Phi3Config(
        **AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="p.gguf").config.to_dict()
        | {
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": short,
                "long_factor": long,
                "attention_factor": 1.19,
                "partial_rotary_factor": rotated / 16,
            },
        }
    )
    stock = Phi3ForCausalLM(config).eval()
    stock.load_state_dict(model.state_dict())
    for length in (200, 2000):
        ids = torch.randint(300, (1, length), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            found, wanted = model(ids).logits, stock(ids).logits
            with mp.compress(model, "full") as kv:
                ours = model(ids, cache=kv).logits
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert model.config.rope_parameters["long_factor"] == long


@pytest.mark.parametrize(
    ("also", "n", "why"),
    [
        ({}, 8, r"without rope.scaling.original_context_length"),
        ({"rope.scaling.original_context_length": 256}, 6, r"with 6 and 6 factors for 8 frequencies"),
    ],
)
def test_factors_of_longrope_that_do_not_fit_are_refused(
    also: dict[str, Any], n: int, why: str, tmp_path: Path
) -> None:
    _phi3(tmp_path / "p.gguf", also, n)
    with pytest.raises(
        OptionError, match=rf"the tensors rope_factors_short.weight and rope_factors_long.weight {why}, so"
    ):
        load_model(tmp_path / "p.gguf")


@pytest.mark.parametrize(("share", "refused"), [(0.25, False), (0.5, True)])
def test_what_full_attention_does_not_rotate(share: float, refused: bool, tmp_path: Path) -> None:
    """Gemma 4 marks it in the same tensor, with factors of 1e30; its configuration says a quarter of each head."""
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=6)
    n = int(share * 16)
    factors = np.array([1.0] * n + [1e30] * (16 - n), dtype=np.float32)
    write_architecture(tmp_path / "g.gguf", "llama", more={FREQS: factors})
    found = take_rope(tmp_path / "g.gguf", read_header(tmp_path / "g.gguf"), config)
    assert found.names == (FREQS,)
    assert found.refused == (
        (f"the tensor {FREQS} (it rotates the first 0.25 of each head of full attention)",) if refused else ()
    )
