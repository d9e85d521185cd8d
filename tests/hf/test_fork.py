"""Copies of a cache: one context and many questions, what is shared, what cannot be copied."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import millpond as mp
from millpond.errors import CacheMismatchError, NotPicklableError
from millpond.methods import METHODS
from tests.engine.test_model_step import wide
from tests.helpers.hf.families import shared_model
from tests.helpers.matrix.models import llama, prompts

OPTIONS: dict[str, dict[str, Any]] = {"fastgen": {"special": "1", "punctuation": "5;6"}, "kvzip": {"ask": "5;6"}}
OPTIONS |= {"attention_matching": OPTIONS["kvzip"]}
#: Need files, or a model with latents; `full` and `minference` take no budget.
SKIPPED = {"qfilters"}
BUDGETS = {"lagkv": 300, "infllm": 180}
UNBOUNDED = {"full", "minference", "fastgen"}
CODECS = ["bf16", "int8", "int4", "int2", "rotated4", "rotated2"]


def settings(method: str) -> dict[str, Any]:
    budget = {} if method in UNBOUNDED else {"budget": BUDGETS.get(method, 90)}
    return {"method": method, **budget, **OPTIONS.get(method, {})}


def read(model: PreTrainedModel, cache: mp.MillpondCache, ids: Tensor, mask: Tensor) -> None:
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, cache=cache)


def ask(model: PreTrainedModel, cache: mp.MillpondCache, ids: Tensor, mask: Tensor, question: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(question)
    more = torch.randint(2, 96, (len(ids), 6), generator=generator)
    whole, seen = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    out: Any = model.generate(  # type: ignore[operator]
        whole, attention_mask=seen, cache=cache, max_new_tokens=6, do_sample=False
    )
    return [[int(i) for i in row] for row in out[:, whole.shape[1] :]]


def check(model: PreTrainedModel, batch: int, **kept: Any) -> None:
    """Every question to a fork is answered as by a cache that read the context alone."""
    ids, mask = prompts(batch, 200)
    fresh = []
    for question in (1, 2):
        with mp.compress(model, **kept) as cache:
            read(model, cache, ids, mask)
            fresh.append(ask(model, cache, ids, mask, question))
    with mp.compress(model, **kept) as cache:
        read(model, cache, ids, mask)
        first, second = cache.fork(), copy.deepcopy(cache)
        found = [ask(model, first, ids, mask, 1), ask(model, second, ids, mask, 2)]
        cache.check_integrity()
        assert found == fresh
        first.close()
        cache.check_integrity()
        assert ask(model, cache, ids, mask, 2) == fresh[1]
        second.close()
        cache.check_integrity()
        cache.reset()
        assert sum(pool.n_live for pool in cache.pools) == 0


@pytest.mark.covering
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("method", [name for name in METHODS.names() if name not in SKIPPED])
def test_a_fork_of_every_method_answers_as_a_fresh_run(method: str, batch: int) -> None:
    check(llama(), batch, page_slots=8, **settings(method))


@pytest.mark.covering
@pytest.mark.parametrize("method", ["full", "h2o", "ada", "snapkv"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_fork_of_every_codec_answers_as_a_fresh_run(codec: str, method: str) -> None:
    check(wide("llama"), 2, codec=codec, **settings(method))


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_a_fork_of_windows_and_latents_answers_as_a_fresh_run(family: str) -> None:
    check(shared_model(family), 2, page_slots=8, method="h2o", budget=24)


def test_a_fork_shares_its_pages_until_it_writes() -> None:
    ids, mask = prompts(1, 64)
    with mp.compress(llama(), "full", page_slots=8) as cache:
        read(llama(), cache, ids, mask)
        alone = sum(pool.n_live for pool in cache.pools)
        with cache.fork() as other:
            assert sum(pool.n_live for pool in cache.pools) == alone
            assert other.stats() == cache.stats()
            ask(llama(), other, ids, mask, 1)
            assert alone < sum(pool.n_live for pool in cache.pools) < 2 * alone
            assert cache.stats().seen == [64]
            assert other.stats().kv_bytes > cache.stats().kv_bytes


def test_a_fork_that_is_forgotten_gives_its_pages_back() -> None:
    ids, mask = prompts(1, 64)
    with mp.compress(llama(), "h2o", 40, page_slots=8) as cache:
        read(llama(), cache, ids, mask)
        alone = sum(pool.n_live for pool in cache.pools)
        other = cache.fork()
        ask(llama(), other, ids, mask, 1)
        assert sum(pool.n_live for pool in cache.pools) > alone
        del other
        gc.collect()
        assert sum(pool.n_live for pool in cache.pools) == alone
        cache.check_integrity()


def test_what_cannot_be_copied_says_why() -> None:
    ids, mask = prompts(1, 64)
    with mp.compress(llama(), "h2o", 40) as cache:
        read(llama(), cache, ids, mask)
        with pytest.raises(NotPicklableError, match=r"save_document.*cache\.fork\(\)"):
            pickle.dumps(cache)
    with pytest.raises(CacheMismatchError, match="fork it before"):
        cache.fork()
