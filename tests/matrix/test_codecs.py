"""Codecs through generate(): what may never change a result, bytes that are real, and later turns."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import millpond as mp
from millpond.codec import resolve
from millpond.codec.spec import Codec
from millpond.errors import OptionError

CODECS = ["int4", "kivi2", "rotated4", "rotated4+rotated3", "think", "bf16+int4", "mikv"]
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "h2o": {"sinks": 2},
    "ada": {"score": "h2o"},
    "snapkv": {"window": 8, "decode": "evict"},
    "tova": {},
    "window": {"sinks": 1},
}
CASES = [
    (method, codec)
    for method in METHODS
    for codec in CODECS
    if not (codec == "mikv" and method == "full")
    and not (method in ("tova", "window") and codec in ("think", "bf16+int4", "rotated4+rotated3"))
]
BUDGET, LENGTH, STEPS = 150, 220, 40


@lru_cache(maxsize=1)
def llama() -> LlamaForCausalLM:
    """A random Llama with head_dim 64, whose attention is sharp."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 6
            layer.self_attn.k_proj.weight *= 6
            layer.self_attn.v_proj.weight *= 8
    return model


def prompts(batch: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    ids = torch.randint(2, 96, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for b in range(1, batch):
        ids[b, : 23 * b], mask[b, : 23 * b] = 0, 0
    return ids, mask


def settings(method: str, codec: str, budget: Any = BUDGET) -> dict[str, Any]:
    own = METHODS[method] | ({"every": 0} if (method, codec) == ("ada", "mikv") else {})
    return {"method": method, "codec": codec, **own, **({} if method == "full" else {"budget": budget})}


def run(cache: mp.MillpondCache, ids: Tensor, mask: Tensor, steps: int = STEPS, **kwargs: Any) -> Tensor:
    out = llama().generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, cache=cache, **kwargs
    )
    cache.check_integrity()
    return out[:, ids.shape[1] :]


@pytest.mark.covering
@pytest.mark.parametrize(("method", "codec"), CASES)
def test_a_budget_of_everything_is_the_full_cache(method: str, codec: str) -> None:
    """With nothing evicted every method gives what `full` gives in that format, bit by bit."""
    ids, mask = prompts(2)
    plain = codec if codec != "mikv" else "bf16"  # with nothing to demote there is no lower tier
    with torch.no_grad(), mp.compress(llama(), method="full", codec=plain) as cache:
        expected, rows = run(cache, ids, mask), [layer_cache.read(1) for layer_cache in cache.layer_caches]
    with torch.no_grad(), mp.compress(llama(), **settings(method, codec, 1000)) as cache:
        assert run(cache, ids, mask).tolist() == expected.tolist()
        for layer_cache, row in zip(cache.layer_caches, rows, strict=True):
            found = layer_cache.read(1)
            n = row.positions.shape[1]
            assert torch.allclose(found.keys[:, :n], row.keys, atol=1e-4)
            assert torch.equal(found.positions[:, :n], row.positions)


@pytest.mark.covering
@pytest.mark.parametrize(("method", "codec"), CASES)
def test_a_second_turn(method: str, codec: str) -> None:
    """A later turn meets what is quantized; it holds its budget, and the cache what it says."""
    ids, mask = prompts(2)
    more = torch.randint(2, 96, (2, 60), generator=torch.Generator().manual_seed(9))
    with torch.no_grad(), mp.compress(llama(), **settings(method, codec)) as cache:
        first = run(cache, ids, mask, 20)
        text = torch.cat([ids, first, more], 1)
        seen = torch.cat([mask, torch.ones(2, 80, dtype=mask.dtype)], 1)
        second = run(cache, text, seen, 20)
        assert second.shape == (2, 20)
        stats = cache.stats()
        if method == "full" or codec == "mikv":
            assert all(layer == [[seen] * 2 for seen in stats.seen] for layer in stats.stored)
        else:
            assert all(sum(row) == 2 * BUDGET for layer in stats.stored for row in layer)


@pytest.mark.covering
@pytest.mark.parametrize(("method", "codec"), CASES)
def test_bytes_are_real(method: str, codec: str) -> None:
    """What `stats` says is what the pages in use hold, and all of it comes back."""
    ids, mask = prompts(2)
    with torch.no_grad(), mp.compress(llama(), **settings(method, codec)) as cache:
        run(cache, ids, mask)
        stats = cache.stats()
        assert stats.kv_bytes == sum(pool.n_live * pool.kv_bytes_per_page for pool in cache.pools)
        assert stats.reserved_bytes == sum(
            t.numel() * t.element_size() for pool in cache.pools for arenas in pool.arrays.arrays for t in arenas
        )
        tables = [layer_cache.table for layer_cache in cache.layer_caches if layer_cache.table is not None]
        live = sum(int(t.quantized.live.sum()) for t in tables if t.quantized is not None)
        held = sum(len(t.quantized.held()) for t in tables if t.quantized is not None)
        slots = cache.pools[-1].slots
        assert held * slots <= 2 * live + 2 * slots * 2 * 2 * 2
        entries = sum(n for layer in stats.stored for row in layer for n in row)
        assert stats.bits_per_element == pytest.approx(8 * stats.kv_bytes / (entries * 128))
        cache.reset()
        assert sum(pool.n_live for pool in cache.pools) == 0


@pytest.mark.parametrize("method", ["kvmerger", "merge_on_evict", "d2o", "ems"])
def test_what_is_merged_is_stored_as_the_rest(method: str) -> None:
    """A merge makes entries of numbers that are not rotated; a rotated format holds them rotated too."""
    ids, mask = prompts(1)
    options = {"decode": "grow"} if method in ("d2o", "ems") else {}
    held = []
    for codec in ("bf16", "rotated4"):
        with torch.no_grad(), mp.compress(llama(), method, BUDGET, codec, **options) as cache:
            run(cache, ids, mask, 2)
            held.append([layer_cache.read(0) for layer_cache in cache.layer_caches])
    for plain, rotated in zip(*held, strict=True):
        assert torch.equal(plain.positions, rotated.positions)
        for a, b in ((plain.keys, rotated.keys), (plain.values, rotated.values)):
            assert 0 < float((a.float() - b).norm() / a.float().norm()) < 0.12


def test_bytes_follow_the_plan() -> None:
    """After the prompt pages of codes hold what the plan keeps, within a page per head of each part."""
    ids, mask = prompts(2)
    with torch.no_grad(), mp.compress(llama(), "ada", 150, "flexgen4", score="h2o", page_slots=32) as cache:
        llama()(ids, attention_mask=mask, cache=cache)
        stats = cache.stats()
        entries = sum(n for layer in stats.stored for row in layer for n in row)
        per_entry, regions = 2 * 64 * 4.5 / 8, 2 * 2 * 2
        plain = 2 * 64 * 4 * 32  # a page of float32
        assert entries * per_entry - regions * 32 * per_entry <= stats.kv_bytes
        assert stats.kv_bytes <= entries * per_entry + regions * plain


@pytest.mark.parametrize("codec", ["int4", "rotated4"])
def test_beams_and_several_sequences(codec: str) -> None:
    ids, mask = prompts(2)
    for kwargs in ({"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}):
        with torch.no_grad(), mp.compress(llama(), **settings("h2o", codec)) as cache:
            assert run(cache, ids, mask, 20, **kwargs).shape[1] == 20


@pytest.mark.parametrize("codec", ["int4", "flexgen4"])
def test_assisted_generation_changes_nothing(codec: str) -> None:
    """Drafts that are taken back leave no trace in what is quantized."""
    ids, mask = prompts(1)
    with torch.no_grad(), mp.compress(llama(), **settings("h2o", codec)) as cache:
        expected = run(cache, ids, mask)
    with torch.no_grad(), mp.compress(llama(), **settings("h2o", codec)) as cache:
        found = run(cache, ids, mask, prompt_lookup_num_tokens=3)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("codec", ["kivi2", "int4"])
def test_a_head_that_no_group_divides_is_refused(codec: str) -> None:
    from tests.helpers.matrix.models import llama as narrow

    ids = torch.randint(2, 96, (1, 20))
    with mp.compress(narrow(dtype=torch.float32), "full", codec=codec) as cache, pytest.raises(OptionError) as error:
        narrow(dtype=torch.float32)(ids, cache=cache)
    assert "head_dim=8" in str(error.value)


def test_names_of_pairs() -> None:
    joined, pair = resolve("bf16+int4"), resolve(("bf16", "int4"))
    assert isinstance(joined, Codec)
    assert joined == pair
    assert joined.name == "bf16+int4"
    assert resolve("bf16+bf16") is torch.bfloat16
    for bad in ("auto+int4", "int4+", "int4+int4+int4", "int4+kvi2", "int4+rotated4"):
        with pytest.raises(OptionError):
            resolve(bad)


@pytest.mark.covering
@pytest.mark.parametrize("amount", [120_000, 190_000, 400_000])
@pytest.mark.parametrize(
    ("method", "codec"),
    [("h2o", "int8"), ("ada", "int4"), ("snapkv", "flexgen4"), ("window", "kivi2"), ("tova", "flexgen4")],
)
def test_a_budget_in_bytes_holds(method: str, codec: str, amount: int) -> None:
    """Pages of both kinds, tombstones, side arrays and tables stay inside."""
    ids, mask = prompts(1, 420)
    most = 0
    with torch.no_grad(), mp.compress(llama(), method, f"{amount}B", codec, **METHODS[method]) as cache:
        step, seen = ids, mask
        for _ in range(100):
            logits = llama()(step, attention_mask=seen, cache=cache).logits
            stats = cache.stats()
            most = max(most, stats.kv_bytes + stats.metadata_bytes)
            step = logits[:, -1:].argmax(-1)
            seen = torch.cat([seen, torch.ones_like(step)], 1)
    assert amount / 3 < most <= amount


def test_one_limit_for_pages_of_both_kinds() -> None:
    """A full pool says so, and what was cached before stays readable."""
    ids, mask = prompts(1)
    with torch.no_grad(), mp.compress(llama(), "full", codec="int4", memory_limit="200KiB") as cache:
        with pytest.raises(mp.PoolFullError):
            run(cache, ids, mask, 400)
        stats = cache.stats()
        assert stats.reserved_bytes <= 200 * 1024
        assert stats.stored[0][0][0] >= LENGTH
        for layer_cache in cache.layer_caches:
            assert layer_cache.read(0).positions[0].tolist() == list(range(int(layer_cache.stored[0, 0])))
        cache.check_integrity()


def test_heads_with_rules_of_their_own() -> None:
    """FastGen's local heads let go of quantized entries too: they keep the positions that they keep without codes."""
    ids, mask = prompts(2)
    kept = []
    for codec in ("bf16", "flexgen4"):
        rules = {"special": "0;1", "punctuation": "5;6", "threshold": 0.3}
        with torch.no_grad(), mp.compress(llama(), "fastgen", codec=codec, **rules) as cache:
            step, seen, text = ids, mask, torch.randint(2, 96, (2, 60), generator=torch.Generator().manual_seed(2))
            for column in range(60):
                llama()(step, attention_mask=seen, cache=cache)
                step = text[:, column : column + 1]
                seen = torch.cat([seen, torch.ones_like(step)], 1)
            cache.check_integrity()
            kept.append([cache.positions(0, s) for s in range(2)])
    assert kept[0] == kept[1]
    assert len(kept[0][0][0]) < LENGTH
