"""A prompt lies in pages of the model's own dtype until its plan: no cut changes anything, and its room is counted."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import millpond as mp
from millpond.cache.entries import read_write
from millpond.cache.layer.prompt_pages import PromptPages
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool_set import PoolSet
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.codec import resolve
from millpond.codec.calibration import Calibration
from millpond.engine.engine import Engine
from millpond.engine.memory_estimate import estimate
from millpond.engine.request import Request
from millpond.errors import PoolFullError
from millpond.hf.calibration.measure import calibrate
from millpond.kernels import ops
from millpond.kernels.args import EntryRows
from tests.helpers.engine.helpers import finish
from tests.matrix.test_codecs import llama

CODECS = mp.list_codecs()
METHODS: dict[str, dict[str, Any]] = {"full": {}, "h2o": {}, "ada": {"every": 0}, "snapkv": {"window": 8}}
LENGTH, NEW = 150, 6


def drawn(length: int = LENGTH, seed: int = 3) -> tuple[int, ...]:
    return tuple(torch.randint(5, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


@cache
def calibration() -> Calibration:
    return calibrate(llama(), torch.tensor(drawn(400)), windows=1, length=300, fisher=False)


def method_of(codec: str) -> str:
    """Each codec with one of the methods, so that all of them come up."""
    if codec.startswith("kvquant") and codec.endswith("_paper"):
        return "full"
    names = [name for name in METHODS if name != "full" or "mikv" not in codec]
    return names[CODECS.index(codec) % len(names)]


def engine_for(method: str, codec: str, **more: Any) -> Engine:
    return Engine(
        llama(),
        method=method,
        options=METHODS[method],
        budget=None if method == "full" else "60%",
        codec=codec,
        calibration=calibration() if codec.startswith("kvquant") else None,
        **more,
    )


def answered(engine: Engine, **more: Any) -> mp.RequestOutput:
    params = mp.SamplingParams(max_tokens=NEW, temperature=0, logprobs=0, prompt_logprobs=0)
    engine.add(Request(request_id="it", prompt=drawn(), params=params, **more))
    found = finish(engine)["it"]
    engine.close()
    return found


@pytest.mark.in_turns(0, of=3)
@pytest.mark.parametrize("codec", CODECS)
def test_where_a_prompt_is_cut_changes_no_log_probability(codec: str) -> None:
    method = method_of(codec)
    whole, cut = (answered(engine_for(method, codec, max_step_tokens=n)) for n in (LENGTH, 13))
    assert whole.prompt_logprobs is not None
    assert cut.prompt_logprobs is not None
    for a, b in zip(whole.prompt_logprobs[1:], cut.prompt_logprobs[1:], strict=True):
        assert abs(a.logprob - b.logprob) < 1e-5
    (first, *later), (again, *behind) = whole.completions[0].logprobs, cut.completions[0].logprobs
    assert abs(first.logprob - again.logprob) < 1e-5
    assert whole.completions[0].token_ids == cut.completions[0].token_ids
    for a, b in zip(later, behind, strict=True):  # a number on the edge between two codes may become the other one
        assert abs(a.logprob - b.logprob) < 1e-3


@pytest.mark.parametrize("codec", ["bf16", "int4", "rotated4"])
def test_so_it_is_in_a_later_turn(codec: str) -> None:
    found, later = [], torch.tensor([drawn(99, seed=4)])
    for step in (100, 9):
        with torch.no_grad(), mp.compress(llama(), "full", codec=codec, between_chunks=False) as cache:
            llama()(torch.tensor([drawn()]), cache=cache)
            llama()(torch.tensor([[7]]), cache=cache)
            parts = [llama()(ids, cache=cache).logits[0] for ids in later.split(step, 1)]
            found.append(torch.cat(parts).log_softmax(-1))
            llama()(torch.tensor([[7]]), cache=cache)
            cache.check_integrity()
            assert not any(layer_cache.pending for layer_cache in cache.layer_caches)
    assert float((found[0] - found[1]).abs().max()) < 1e-5


@pytest.mark.covering
@pytest.mark.parametrize("codec", ["bf16", "int4", "kivi2", "rotated4", "mikv", "think"])
@pytest.mark.parametrize("method", ["full", "h2o", "ada"])
def test_what_is_held_is_never_more_than_was_counted(method: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (method, codec) == ("full", "mikv"):
        pytest.skip("nothing leaves, so there is no lower tier")
    held = [0]
    allocate = RefCountedPool.allocate

    def watched(self: RefCountedPool[Any], n: int) -> np.ndarray:
        ids = allocate(self, n)
        assert isinstance(self.memory_limit, MemoryLimit)
        held.append(self.memory_limit.live_bytes)
        return ids

    monkeypatch.setattr(RefCountedPool, "allocate", watched)
    engine = engine_for(method, codec, max_step_tokens=64)
    cache_factory = engine._parts.decode_groups.group(engine.cache).cache_factory
    need = estimate(cache_factory, LENGTH, NEW, 1)
    answered(engine)
    assert 0.4 * need.prefill < max(held) <= need.peak(1)


@pytest.mark.parametrize("codec", ["bf16", "int4", "rotated2", "fp8"])
def test_behind_the_plan_pages_are_those_of_the_codec(codec: str) -> None:
    engine = engine_for("full", codec, max_step_tokens=40)
    engine.add(Request(request_id="it", prompt=drawn(), params=mp.SamplingParams(max_tokens=NEW, temperature=0)))
    while not engine._requests["it"].completions[0].tokens:
        engine.step()
    waiting = [pool for pool in engine._parts.memory.pools if getattr(pool, "until_plan", False)]
    assert [pool.arrays.dtype for pool in waiting] == [torch.float32]
    assert not any(pool.n_live for pool in waiting)
    tables = [layer_cache.table for layer_cache in engine._requests["it"].group.batch_cache.layers]
    assert {table.pool.arrays.dtype for table in tables if table is not None} == {torch.bfloat16}
    with torch.no_grad(), mp.compress(llama(), "full", codec=codec) as cache:
        llama()(torch.tensor([drawn()]), cache=cache)
        expected = cache.stats().kv_bytes
    kv = engine._requests["it"].completions[0].kv
    assert kv is not None
    assert kv.kv_bytes == expected
    engine.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", ["auto", "int4", "rotated4", "think"])
def test_models_of_16_bits_read_into_the_pages_that_stay(dtype: torch.dtype, codec: str) -> None:
    pools = PoolSet(resolve(codec), 16, MemoryLimit(None), masses=False)
    here = torch.device("cpu")
    assert pools.reading(64, 64, dtype, here) is pools.plain(64, 64, dtype, here)
    assert not pools.plain(64, 64, dtype, here).until_plan


def test_a_plan_that_finds_no_room_leaves_what_was_read() -> None:
    pools = PoolSet(torch.bfloat16, 16, MemoryLimit(None), masses=False)
    pages = PromptPages(pools.plain, pools.reading, lambda: True)
    k, v = torch.randn(2, 2, 3, 40, 64, generator=torch.Generator().manual_seed(0))
    table = PageTable(pages.pool(k, v, planned=False), 2, 3)
    assert table.unplanned
    for s in range(2):
        table.reserve(s, np.full(3, 40, dtype=np.int32))
        index = torch.arange(40, dtype=torch.int32).expand(3, -1).contiguous()
        zeros, counts = torch.zeros(3, dtype=torch.int32), torch.full((3,), 40, dtype=torch.int32)
        ops.write(table.regions_of(table.rows(s)), EntryRows(zeros, counts, index, k[s], v[s], index))
        table.set_lengths(s, np.full(3, 40, dtype=np.int32))

    def plan(into: PageTable, sequence: int) -> None:
        if sequence:
            raise PoolFullError("full")
        entries = read_write.read(table, sequence)
        read_write.replace(into, sequence, entries, entries.positions >= 10)

    with pytest.raises(PoolFullError):
        pages.end(table, [0, 1], plan)
    assert table.lengths().tolist() == [[30] * 3, [40] * 3]  # what was planned stays so
    dense = ops.read(table.regions, 40)
    assert torch.equal(dense.keys[3:], k[1])
    assert torch.equal(dense.keys[:3, :30], k[0, :, 10:].bfloat16().float())
    for pool in pools:
        pool.check_integrity([table.held()] if pool is table.pool else [])


def test_a_limit_holds_while_several_prompts_are_read() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        engine = engine_for("h2o", "int4", kv_memory="1200kB", overcommit=3, max_step_tokens=64)
        params = mp.SamplingParams(max_tokens=NEW, temperature=0)
        for seed in range(6):
            engine.add(Request(request_id=str(seed), prompt=drawn(seed=seed), params=params))
        done = finish(engine)
        engine.close()
    assert all(len(one.completions[0].token_ids) == NEW for one in done.values())


@pytest.mark.parametrize(("method", "codec"), [("full", "bf16"), ("h2o", "int4"), ("snapkv", "bf16:20,kivi4:50,kivi2")])
def test_each_layer_holds_what_its_demand_says(method: str, codec: str) -> None:
    engine = engine_for(method, codec, max_step_tokens=64)
    cache_factory = engine._parts.decode_groups.group(engine.cache).cache_factory
    demands = cache_factory.demands(LENGTH, NEW)
    engine.add(Request(request_id="it", prompt=drawn(), params=mp.SamplingParams(max_tokens=NEW, temperature=0)))
    n_read = 0
    while not engine._requests["it"].completions[0].tokens:
        engine.step()
        cache = engine._requests["it"].private_cache
        for layer_cache, demand in zip(() if cache is None else cache.layers, demands, strict=False):
            if (table := layer_cache.table) is not None:
                n_read = max(n_read, int(table.lengths().max()))
                assert n_read <= demand.prompt_entries
                assert len(table.held()) <= demand.prompt_pages[table.pool]
    assert n_read > LENGTH // 2
    tables = [layer_cache.table for layer_cache in engine._requests["it"].group.batch_cache.layers]
    for table, demand in zip(tables, demands, strict=True):
        assert demand.kept_entries <= table.entries().mean() <= demand.kept_entries + 1
        kept, most = demand.kept_pages, demand.decode_pages
        for held in (table, *table.packed_parts):
            assert len(held.held()) <= kept[held.pool] <= most[held.pool]
            assert kept[held.pool] <= 2 * (len(held.held()) + 2 * table.n_kv_heads)  # half of the codes may be dead
    engine.close()
