"""Locret through every check of the matrix, in families of models, and the peak of prefill="chunks"."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.cache.entries import read_write
from millpond.hf import retaining_heads
from millpond.policy.trained.networks import RetainingHeads
from millpond_lab.bench.methods.candidate import random_heads
from tests.helpers.hf.families import left_padded, shared_model
from tests.helpers.matrix.checks import CHECKS
from tests.helpers.matrix.hidden import equals_a_mask
from tests.helpers.matrix.models import llama, prompts
from tests.matrix import test_invariance as matrix

EVICT: dict[str, Any] = {"sinks": 1, "recent": 2, "decode": "evict"}
#: Methods that evict while a prompt is read, in chunks that end inside it.
CHUNKED: dict[str, dict[str, Any]] = {
    "locret": {"sinks": 1, "recent": 2},
    "keydiff": {"sinks": 1},
    "knorm": {},
    "lagkv": {"lag": 4, "sinks": 2},
    "qfilters": {"recent": 2},
}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt_neox", "gemma2", "phi"]
pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.FewEntriesWarning")


@pytest.fixture(autouse=True)
def _known_to_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, "locret", EVICT)


@pytest.mark.parametrize("check", CHECKS)
def test_matrix(check: str) -> None:
    CHECKS[check]("locret")


@pytest.mark.in_turns(0, of=2)
@pytest.mark.parametrize("check", CHECKS)
def test_matrix_with_heads_that_compete(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, "locret", {**EVICT, "compete": "layer"})
    CHECKS[check]("locret")


@pytest.mark.parametrize("raised", [0, 1])
def test_layers_compete_for_the_budget_of_the_model(raised: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer whose labels are all higher holds all that the other does not protect."""
    given = random_heads(llama())
    layers = [replace(heads, b2=heads.b2 + 50.0 * (i == raised)) for i, heads in enumerate(given.layers)]
    heads = RetainingHeads(layers, given.model, given.name, given.facts)
    monkeypatch.setattr(retaining_heads, "heads_of_package", lambda model: heads)
    ids = torch.arange(2, 62)[None]
    with torch.no_grad(), mp.compress(llama(), "locret", 20, sinks=1, recent=2, compete="model") as cache:
        llama()(input_ids=ids, cache=cache)
        stored = [[len(head) for head in cache.positions(layer)] for layer in (0, 1)]
    assert stored[1 - raised] == [3] * len(stored[0])
    assert sum(map(sum, stored)) == 20 * 2 * len(stored[0])


def test_drop_equals_mask() -> None:
    model, (ids, mask) = llama("gqa"), prompts(2)
    with torch.no_grad(), mp.compress(model, "locret", 14, page_slots=4, **EVICT) as cache:
        equals_a_mask(model, cache, ids, mask, 10, after=lambda: None)


@pytest.mark.covering
@pytest.mark.parametrize("method", CHUNKED)
@pytest.mark.parametrize("decode", ["grow", "evict"])
def test_chunks_are_those_of_the_text_whatever_the_passes_and_the_batch(method: str, decode: str) -> None:
    """A left-padded batch in one pass, in passes of 7 and alone: the same tokens and entries."""
    options = {**CHUNKED[method], "prefill": "chunks", "chunk": 9, "decode": decode}
    ids, mask = prompts(2)

    def run(rows: list[int], chunk: int | None = None) -> Any:
        own_ids, own_mask = ids[rows], mask[rows]
        if len(rows) == 1:
            own_ids, own_mask = (t[:, own_mask[0].bool()] for t in (own_ids, own_mask))
        with torch.no_grad(), mp.compress(llama(), method, 14, between_chunks=chunk is None, **options) as cache:
            out = llama().generate(
                input_ids=own_ids,
                attention_mask=own_mask,
                max_new_tokens=6,
                do_sample=False,
                cache=cache,
                prefill_chunk_size=chunk,
            )
            cache.check_integrity()
            return out[:, own_ids.shape[1] :].tolist(), [cache.positions(1, s) for s in range(len(rows))]

    tokens, kept = run([0, 1])
    assert run([0, 1], 7) == (tokens, kept)
    for s in (0, 1):
        assert run([s]) == ([tokens[s]], [kept[s]])
    once = {**CHUNKED[method], "decode": decode}
    with torch.no_grad(), mp.compress(llama(), method, 14, **once) as cache:
        llama()(ids[:1], cache=cache)
        whole = cache.positions(1, 0)
    with torch.no_grad(), mp.compress(llama(), method, 14, **options) as cache:
        llama()(ids[:1], cache=cache)
        assert cache.positions(1, 0) != whole or method in ("knorm", "locret")  # scores that stay as they are


@pytest.mark.parametrize("method", CHUNKED)
def test_the_peak_is_kept_inside_a_pass(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer ever holds, or looks at, more than budget + chunk entries per KV head of a prompt of 120."""
    seen: list[int] = []
    join = read_write.join

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = join(*args, **kwargs)
        seen.append(int((found.positions >= 0).sum(1).max()))
        return found

    monkeypatch.setattr(read_write, "join", watched)
    model, (ids, _) = llama(), prompts(1, length=120)
    options = {**CHUNKED[method], "prefill": "chunks", "chunk": 16}
    with torch.no_grad(), mp.compress(model, method, 20, page_slots=2, **options) as cache:
        model(ids, cache=cache)
        assert max(seen) <= 20 + 16
        assert len(seen) >= 2 * 7
        assert max(max(h) for layer in cache.stats().stored for h in layer) == 20


def test_a_share_is_that_of_the_whole_prompt() -> None:
    """Of a prompt that is read in one pass every chunk has the budget of the whole."""
    model, (ids, _) = llama(), prompts(1, length=120)
    kept = []
    for budget in ("25%", 30):
        with (
            torch.no_grad(),
            mp.compress(model, "locret", budget, sinks=1, recent=2, prefill="chunks", chunk=16) as cache,
        ):
            model(ids, cache=cache)
            kept.append(cache.positions(1))
    assert kept[0] == kept[1]


def test_a_question_that_a_chunk_ends_in_stays_whole() -> None:
    model, (ids, _) = llama(), prompts(1, length=38)
    with torch.no_grad(), mp.compress(model, "keydiff", 30, prefill="chunks", chunk=20) as cache:
        model(ids[:, :34], cache=cache)
        model(ids[:, 34:], cache=cache)
        model(ids[:, :5], cache=cache)  # a chunk ends behind position 39
        for head in cache.positions(1):
            assert len(head) == 30
            assert head[-5:] == [38, 39, 40, 41, 42]


@pytest.mark.covering
@pytest.mark.parametrize("prefill", ["once", "chunks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_batch_and_alone(family: str, prefill: str) -> None:
    model = shared_model(family)
    batch = left_padded([40, 31])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    options = {"sinks": 1, "recent": 2, "prefill": prefill, "chunk": 8}
    with torch.no_grad(), mp.compress(model, "locret", 14, **options) as cache:
        together = model.generate(**batch, max_new_tokens=5, do_sample=False, cache=cache)[:, ids.shape[1] :]
        kept = [cache.positions(len(cache.layers) - 1, s) for s in (0, 1)]
    for s in (0, 1):
        own = ids[s, mask[s].bool()][None]
        with torch.no_grad(), mp.compress(model, "locret", 14, **options) as cache:
            out = model.generate(
                input_ids=own, attention_mask=torch.ones_like(own), max_new_tokens=5, do_sample=False, cache=cache
            )
            assert out[0, own.shape[1] :].tolist() == together[s].tolist()
            assert cache.positions(len(cache.layers) - 1) == kept[s]


def test_cache_relative_positions_batch_and_alone() -> None:
    """Beyond the positions that the model was trained on gaps close, whatever is beside a sequence."""
    model = shared_model("llama")
    batch = left_padded([300, 281])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    options: dict[str, Any] = {"positions": "cache_relative", "prefill": "chunks", "chunk": 32}
    with torch.no_grad(), mp.compress(model, "locret", 40, **options) as cache:
        together = model.generate(**batch, max_new_tokens=5, do_sample=False, cache=cache)[:, ids.shape[1] :]
    for s in (0, 1):
        own = ids[s, mask[s].bool()][None]
        with torch.no_grad(), mp.compress(model, "locret", 40, **options) as cache:
            out = model.generate(
                input_ids=own, attention_mask=torch.ones_like(own), max_new_tokens=5, do_sample=False, cache=cache
            )
        assert out[0, own.shape[1] :].tolist() == together[s].tolist()


@pytest.mark.covering
@pytest.mark.parametrize("codec", ["int8", "int4", "kivi2", "rotated2", "fp8"])
@pytest.mark.parametrize("prefill", ["once", "chunks"])
def test_codecs_change_no_choice(codec: str, prefill: str) -> None:
    """Scores are made before anything is quantized, so a prompt that is read in one pass keeps the same entries."""
    from millpond.models.load import load_model

    model = load_model("pond-recall", "f32")
    ids = torch.randint(20, 320, (1, 400), generator=torch.Generator().manual_seed(2))
    kept = []
    for name in ("auto", codec):
        with torch.no_grad(), mp.compress(model, "locret", 200, name, prefill=prefill, chunk=128) as cache:
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, cache=cache
            )
            kept.append(cache.positions(0))
            cache.check_integrity()
    assert kept[0] == kept[1]
