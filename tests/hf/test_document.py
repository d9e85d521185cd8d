"""A text is read once; what is restored from its file answers as the cache that read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import millpond as mp
from millpond.errors import CacheMismatchError, DataError
from millpond.hf.document import read_document, restore_document, save_document
from millpond.methods import METHODS
from tests.helpers.matrix.models import llama

IDS = torch.randint(2, 96, (1, 90), generator=torch.Generator().manual_seed(4))
QUESTION = torch.randint(2, 96, (1, 5), generator=torch.Generator().manual_seed(5))
OPTIONS: dict[str, dict[str, Any]] = {
    "dms": {"window": 8},
    "duo_attention": {"recent": 8},
    "simlayerkv": {"recent": 8},
    "fastgen": {"special": "2;3", "punctuation": "5;6", "threshold": 0.7},
    "infllm": {"sinks": 2, "block": 4, "local": 8, "representatives": 2},
    "attention_matching": {"ask": "5;6"},
    "kvzip": {"ask": "5;6"},
    "random_attention": {"recent": 8},
    "vase": {"window": 8},
    "layer_table": {"table": "3;1"},
}
REFUSED = {"sirllm"}


def logits(model: Any, cache: Any, ids: Tensor) -> list[Tensor]:
    """Of the question, read at once, and of some tokens behind it."""
    found = [model(ids, cache=cache).logits[0, -1]]
    found += [model(torch.tensor([[token]]), cache=cache).logits[0, -1] for token in (7, 9, 11)]
    return found


@pytest.mark.in_turns(1, of=3)
@pytest.mark.parametrize("method", sorted(set(METHODS.names()) - REFUSED - {"elastic"}))
def test_goes_on_as_what_was_saved(method: str, tmp_path: Path) -> None:
    model = llama("gqa", torch.float32)
    budget = None if method in ("full", "minference") else 40
    with torch.no_grad(), mp.compress(model, method, budget, page_slots=8, **OPTIONS.get(method, {})) as cache:
        read_document(model, cache, IDS)
        assert save_document(cache, IDS, tmp_path / "text") > 0
        expected = logits(model, cache, QUESTION)
    for _ in range(2):  # as often as one likes
        cache, ids = restore_document(model, tmp_path / "text")
        with cache, torch.no_grad():
            assert torch.equal(ids, IDS)
            assert cache.get_seq_length() == 90
            found = logits(model, cache, QUESTION)
            cache.check_integrity()
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", ["int8", "int4", "kivi2", "think:0.5:0.25", "mikv", "int8_mikv"])
def test_codes_keep_their_bytes(codec: str, tmp_path: Path) -> None:
    model = wide()
    ids = torch.randint(2, 96, (1, 300), generator=torch.Generator().manual_seed(6))
    with torch.no_grad(), mp.compress(model, "snapkv", 200, codec) as cache:
        read_document(model, cache, ids)
        save_document(cache, ids, tmp_path / "text")
        held = cache.stats().kv_bytes
        expected = logits(model, cache, QUESTION)
    cache, _ = restore_document(model, tmp_path / "text")
    with cache, torch.no_grad():
        assert cache.stats().kv_bytes == held
        for a, b in zip(expected, logits(model, cache, QUESTION), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def wide() -> Any:
    """A model whose heads are wide enough for groups of channels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("method", ["full", "h2o", "streaming"])
def test_what_was_restored_is_saved_as_it_was(method: str, tmp_path: Path) -> None:
    """Before anything is read behind it, too."""
    model = llama("gqa", torch.float32)
    with torch.no_grad(), mp.compress(model, method, None if method == "full" else 40) as cache:
        read_document(model, cache, IDS)
        save_document(cache, IDS, tmp_path / "text")
    cache, ids = restore_document(model, tmp_path / "text")
    with cache:
        save_document(cache, ids, tmp_path / "again")
    one, other = (load_file(tmp_path / name) for name in ("text", "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_generate_goes_on_behind_the_text(tmp_path: Path) -> None:
    model = llama("gqa", torch.float32)
    with torch.no_grad(), mp.compress(model, "h2o", 40) as cache:
        read_document(model, cache, IDS, chunk=32)
        save_document(cache, IDS, tmp_path / "text")
        expected = model.generate(torch.cat([IDS, QUESTION], 1), cache=cache, max_new_tokens=6)
    cache, ids = restore_document(model, tmp_path / "text")
    with cache:
        found = model.generate(torch.cat([ids, QUESTION], 1), cache=cache, max_new_tokens=6)
    assert torch.equal(found, expected)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    model = llama("gqa", torch.float32)
    with torch.no_grad(), mp.compress(model, "h2o", 40) as cache:
        model(IDS.expand(2, -1), cache=cache)
        with pytest.raises(CacheMismatchError, match="one text"):
            save_document(cache, IDS, tmp_path / "text")
        cache.reset()
        model(IDS, cache=cache)
        with pytest.raises(CacheMismatchError, match="90 tokens in 90 columns, and 89 ids"):
            save_document(cache, IDS[:, 1:], tmp_path / "text")
        with pytest.raises(DataError, match="cannot be written"):
            save_document(cache, IDS, tmp_path / "nowhere" / "text")
    assert not (tmp_path / "text").exists()


def test_another_model_and_other_files(tmp_path: Path) -> None:
    model = llama("gqa", torch.float32)
    with torch.no_grad(), mp.compress(model, "h2o", 40) as cache:
        read_document(model, cache, IDS)
        save_document(cache, IDS, tmp_path / "text")
    with pytest.raises(CacheMismatchError, match="another model"):
        restore_document(llama("mha", torch.float32), tmp_path / "text")
    with pytest.raises(DataError, match="cannot be read"):
        restore_document(model, tmp_path / "none")
    (tmp_path / "broken").write_bytes((tmp_path / "text").read_bytes()[:500])
    with pytest.raises(DataError, match="cannot be read"):
        restore_document(model, tmp_path / "broken")
    assert model.config._attn_implementation == "sdpa"
