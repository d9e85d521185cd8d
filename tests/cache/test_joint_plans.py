"""The plans of all layers at the end of a prompt, made together: what each layer keeps is what it would keep alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millpond.cache import batch_cache as batch_cache_module
from millpond.cache.batch_cache import BatchCache
from millpond.cache.layer import joint_plans
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages import publishing
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool import PagePool
from millpond.cache.pages.pool_set import PoolSet
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.planning import prompt_selection
from millpond.cache.state.positions import PositionTracker
from millpond.codec import resolve
from millpond.errors import BudgetError, NumericsError, PoolFullError
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from millpond.policy.policy import Policy
from millpond.prompt_marks import PromptMarks
from tests.helpers.codec.elsewhere import Far, elsewhere, to_far
from tests.helpers.device_memory import set_apart

LAYERS, HEADS, GROUP, DIM = 4, 3, 2, 64
SHAPE = AttentionShape(DIM**-0.5)
METHODS_TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "h2o": ("h2o", {}),
    "h2o averaged": ("h2o", {"average": True}),
    "tova": ("tova", {}),
    "snapkv": ("snapkv", {"window": 4}),
    "pyramidkv": ("pyramidkv", {"score": "snapkv/window=4"}),
    "ada": ("ada", {"score": "snapkv/window=4"}),
    "ada at once": ("ada", {"score": "snapkv/window=4", "alpha": 0.0}),
    "ada over h2o": ("ada", {"score": "h2o"}),
    "streaming": ("streaming", {}),
    "window": ("window", {}),
}
#: Entries of each layer.
BUDGETS = [12, 7, 20, 60]


def policy_of(name: str) -> Policy:
    method, options = METHODS_TOGETHER[name]
    return METHODS.get(method)(**options)


def make(
    policy: Policy, pool: PagePool, reading: PagePool | None = None, budgets: list[int] | None = None
) -> BatchCache:
    tracker = PositionTracker()
    own = BUDGETS if budgets is None else budgets

    def layer(index: int) -> LayerCache:
        apart = None if reading is None else lambda *_: reading
        return LayerCache(
            index, policy, lambda *_: own[index], lambda *_: pool, tracker, between_chunks=False, reading=apart
        )

    return BatchCache([layer(index) for index in range(LAYERS)], tracker)


def read(
    batch_cache: BatchCache,
    n: int,
    parts: int = 1,
    dtype: torch.dtype = torch.float32,
    move: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Read a prompt of `n` tokens, in some parts, moved to a device; its plan waits."""
    draw = torch.Generator().manual_seed(7)
    batch_cache.reading = True
    q, k, v = (torch.randn(LAYERS, 1, heads, n, DIM, generator=draw) for heads in (HEADS * GROUP, HEADS, HEADS))
    for part in torch.arange(n).tensor_split(parts):
        batch_cache.begin(part[None])
        for layer_cache, *own in zip(batch_cache.layers, q, k, v, strict=True):
            new = (t[..., part, :].to(dtype) for t in own)
            layer_cache.attend(*(new if move is None else map(move, new)), None, SHAPE)


def held(batch_cache: BatchCache) -> list[list[Tensor]]:
    """Keys, values, positions, scores and budgets of every layer."""
    found = []
    for layer_cache in batch_cache.layers:
        table, entries = layer_cache.table, layer_cache.read(0)
        assert table is not None
        numbers = [torch.from_numpy(x) for x in (table.lengths(), table.budgets(), table.newest_protected())]
        found.append([*entries[:4], *numbers])
    return found


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[BatchCache], None]:
    """Ends a prompt layer by layer."""

    def end(batch_cache: BatchCache) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(batch_cache_module, "run_plans", list)
            batch_cache.run_plans()

    return end


def joined(batch_cache: BatchCache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """End a prompt; return how many layers were planned together, each time that some were."""
    sizes: list[int] = []
    run = joint_plans.JointPlan.run

    def counted(self: Any) -> bool:
        done = run(self)
        sizes.append(len(self._layers) if done else 0)
        return done

    monkeypatch.setattr(joint_plans.JointPlan, "run", counted)
    batch_cache.run_plans()
    return sizes


def assert_same(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> None:
    for layer, (left, right) in enumerate(zip(found, wanted, strict=True)):
        for x, y in zip(left, right, strict=True):
            torch.testing.assert_close(x, y, msg=lambda text, layer=layer: f"layer {layer}: {text}")


def test_heads_that_keep_the_same_do_so_in_each_layer(
    alone: Callable[[BatchCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, pool = replace(policy_of("h2o"), shared=True), PagePool(DIM, DIM, torch.float32, slots=8)
    caches = [make(policy, pool) for _ in range(2)]
    for batch_cache in caches:
        read(batch_cache, 45)
    alone(caches[0])
    assert joined(caches[1], monkeypatch) == [LAYERS]
    assert_same(held(caches[1]), held(caches[0]))
    first, second = (caches[1].layers[layer].read(0).positions for layer in range(2))
    assert (first == first[:1]).all()
    assert not torch.equal(first[0, :7], second[0, :7])


def test_a_prompt_that_stays_whole_is_known_to_every_layer(
    alone: Callable[[BatchCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of("snapkv")
    policy = replace(policy, protect=replace(policy.protect, prompt=True))
    pool = PagePool(DIM, DIM, torch.float32, slots=8)
    caches = [make(policy, pool, budgets=[60, 50, 49, 12]) for _ in range(2)]
    for batch_cache in caches:
        read(batch_cache, 45)
    alone(caches[0])
    assert joined(caches[1], monkeypatch) == [LAYERS]
    assert_same(held(caches[1]), held(caches[0]))
    prompts = [[one.sequence_state.prompts[0] for one in batch_cache.layers] for batch_cache in caches]
    assert prompts == [[((0, 45),)] * LAYERS] * 2


@pytest.mark.parametrize("name", METHODS_TOGETHER)
@pytest.mark.parametrize(("n", "parts"), [(45, 1), (45, 3), (10, 1)])
def test_each_layer_keeps_what_it_would_alone(
    name: str, n: int, parts: int, alone: Callable[[BatchCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, pools = policy_of(name), [PagePool(DIM, DIM, torch.float32, slots=8) for _ in range(2)]
    caches = [make(policy, pool) for pool in pools]
    for batch_cache in caches:
        read(batch_cache, n, parts)
    alone(caches[0])
    assert joined(caches[1], monkeypatch) == [LAYERS]
    assert_same(held(caches[1]), held(caches[0]))
    assert pools[0].n_live == pools[1].n_live
    pools[1].check_integrity([one.table.held() for one in caches[1].layers if one.table is not None])
    assert not any(layer_cache.pending for layer_cache in caches[1].layers)


@pytest.mark.parametrize("codec", ["int4", "int8", "rotated4", "flexgen4", "fp8"])
@pytest.mark.parametrize("name", ["full", "h2o", "ada", "snapkv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_of_all_layers_are_those_of_each_alone(
    name: str, codec: str, dtype: torch.dtype, alone: Callable[[BatchCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, found = METHODS.get("full")() if name == "full" else policy_of(name), []
    monkeypatch.setattr(joint_plans, "ENCODED_TOGETHER", 1 << 18)  # one layer or a few at a time
    for end in (alone, lambda batch_cache: joined(batch_cache, monkeypatch)):
        pools = PoolSet(resolve(codec), 16, MemoryLimit(None), masses=False)
        batch_cache = coded(policy, pools)
        read(batch_cache, 400, 2, dtype)
        assert end(batch_cache) in (None, [LAYERS])
        stores = [one.table.quantized for one in batch_cache.layers if one.table is not None]
        assert all(isinstance(store, QuantizedStore) and store.lens.any() for store in stores)
        codes = [torch.from_numpy(store.lens) for store in stores if store is not None]
        found.append([[*own, lens] for own, lens in zip(held(batch_cache), codes, strict=True)])
        for pool in pools:
            holders = [held_in for one in batch_cache.layers if one.table for held_in in one.table.held_in(pool)]
            holders += [held_in for store in stores if store is not None for held_in in store.held_in(pool)]
            pool.check_integrity(holders)
    assert_same(found[1], found[0])


def test_without_room_for_all_codes_at_once_layers_are_planned_one_by_one(
    alone: Callable[[BatchCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun, found = QuantizedStore.begin, [], []

    def full(self: QuantizedStore, count: np.ndarray) -> None:
        begun.append(self)
        if len(begun) == 3:
            raise PoolFullError("no room for a third one")
        begin(self, count)

    for end in (alone, lambda batch_cache: joined(batch_cache, monkeypatch)):
        pools = PoolSet(resolve("int4"), 16, MemoryLimit(None), masses=False)
        batch_cache = coded(policy_of("h2o"), pools)
        read(batch_cache, 400)
        with monkeypatch.context() as patch:
            patch.setattr(QuantizedStore, "begin", full)
            assert end(batch_cache) in (None, [0])
        found.append(held(batch_cache))
    assert len(begun) == 3
    assert_same(found[1], found[0])


def test_numbers_that_no_code_holds_leave_a_prompt_as_it_was() -> None:
    pools = PoolSet(resolve("int4"), 16, MemoryLimit(None), masses=False)
    batch_cache = coded(METHODS.get("full")(), pools)
    read(batch_cache, 400)
    tables = [one.table for one in batch_cache.layers if one.table is not None]
    live = [pool.n_live for pool in pools]
    tables[1].pool.arrays.keys[0][int(tables[1].pages[0, 3]), 5, 7] = torch.inf
    with pytest.raises(NumericsError):
        batch_cache.run_plans()
    assert [pool.n_live for pool in pools][:1] == live[:1]
    assert not any(pool.n_live for pool in list(pools)[1:])
    assert [int(one.stored.min()) for one in batch_cache.layers] == [400] * LAYERS


def test_layers_whose_pages_others_hold_are_planned_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, pool = policy_of("h2o"), PagePool(DIM, DIM, torch.float32, slots=8)
    batch_cache, other = make(policy, pool), make(policy, pool)
    read(batch_cache, 45)
    batch_cache.copy_to([0], other)
    for layer_cache in other.layers[2:]:
        layer_cache.reset()
    assert joined(batch_cache, monkeypatch) == [2, 2]
    assert [int(one.stored.max()) for one in other.layers[:2]] == [45, 45]
    first = other.layers[0].read(0)
    assert first.positions[0].tolist() == list(range(45))


def coded(policy: Policy, pools: PoolSet) -> BatchCache:
    tracker = PositionTracker()

    def layer(index: int) -> LayerCache:
        return LayerCache(
            index,
            policy,
            lambda *_: 200 + 20 * index,
            pools.plain,
            tracker,
            between_chunks=False,
            quantized=pools.make_quantized,
            reading=pools.reading,
        )

    return BatchCache([layer(index) for index in range(LAYERS)], tracker)


@pytest.mark.parametrize("name", ["h2o", "ada"])
def test_pages_that_others_hold_stay_as_they_are(
    name: str, alone: Callable[[BatchCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, pool = policy_of(name), PagePool(DIM, DIM, torch.float32, slots=8)
    caches = [make(policy, pool) for _ in range(3)]
    read(caches[0], 45)
    for other in caches[1:]:
        caches[0].copy_to([0], other)
        for mine, theirs in zip(caches[0].layers, other.layers, strict=True):
            theirs.sequence_state.become(mine.sequence_state.copy())
    before = held(caches[0])
    alone(caches[1])
    assert joined(caches[2], monkeypatch) == [LAYERS]
    assert_same(held(caches[2]), held(caches[1]))
    assert_same(held(caches[0]), before)
    pool.check_integrity([c.table.held() for one in caches for c in one.layers if c.table is not None])


def test_a_prompt_that_was_read_into_wider_pages_moves_to_narrow_ones(
    alone: Callable[[BatchCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, found = policy_of("snapkv"), []
    for end in (alone, lambda batch_cache: joined(batch_cache, monkeypatch)):
        pool = PagePool(DIM, DIM, torch.bfloat16, slots=8)
        reading = PagePool(DIM, DIM, torch.float32, slots=16, until_plan=True)
        batch_cache = make(policy, pool, reading)
        read(batch_cache, 45, 2)
        assert reading.n_live
        end(batch_cache)
        assert not reading.n_live
        found.append(held(batch_cache))
    assert_same(found[1], found[0])


def test_without_room_for_all_at_once_layers_are_planned_one_by_one(
    alone: Callable[[BatchCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, found = policy_of("h2o"), []
    page_bytes = PagePool(DIM, DIM, torch.float32, slots=8).page_bytes
    for end in (alone, lambda batch_cache: joined(batch_cache, monkeypatch)):
        pool = PagePool(DIM, DIM, torch.float32, slots=8, limit_bytes=(LAYERS * HEADS * 6 + 12) * page_bytes)
        batch_cache, other = (make(policy, pool, budgets=[20] * LAYERS) for _ in range(2))
        read(batch_cache, 45)
        batch_cache.copy_to([0], other)
        for layer_cache in other.layers:
            assert layer_cache.table is not None
            layer_cache.table.set_lengths(0, np.full(HEADS, 8, dtype=np.int32))  # the first page of each head
        assert end(batch_cache) in (None, [0])
        found.append(held(batch_cache))
    assert_same(found[1], found[0])


@pytest.mark.parametrize(("method", "options"), [("full", {}), ("knorm", {}), ("cam", {}), ("random", {})])
def test_other_plans_are_made_layer_by_layer(
    method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = METHODS.get(method)(**options)
    batch_cache = make(policy, PagePool(DIM, DIM, torch.float32, slots=8, masses=policy.mass_bias))
    read(batch_cache, 45)
    assert joined(batch_cache, monkeypatch) == []
    assert not any(layer_cache.pending for layer_cache in batch_cache.layers)


def test_kept_spans_are_planned_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_cache = make(policy_of("h2o"), PagePool(DIM, DIM, torch.float32, slots=8), budgets=[20] * LAYERS)
    batch_cache.mark(PromptMarks(keep=((5, 9),)))
    read(batch_cache, 45)
    assert joined(batch_cache, monkeypatch) == []
    assert {5, 6, 7, 8} <= set(batch_cache.layers[0].read(0).positions[0].tolist())


def test_errors_come_before_anything_changes() -> None:
    batch_cache = make(policy_of("h2o"), PagePool(DIM, DIM, torch.float32, slots=8))
    read(batch_cache, 45)
    table = batch_cache.layers[2].table
    assert table is not None
    table.pool.arrays.scores[0][int(table.pages[1, 2]), 3] = torch.nan
    with pytest.raises(NumericsError, match="layer 2"):
        batch_cache.run_plans()
    assert [int(one.stored.min()) for one in batch_cache.layers] == [45] * LAYERS
    batch_cache = make(policy_of("snapkv"), PagePool(DIM, DIM, torch.float32, slots=8), budgets=[9, 3, 9, 9])
    read(batch_cache, 45)
    with pytest.raises(BudgetError):
        batch_cache.run_plans()
    assert [int(one.stored.min()) for one in batch_cache.layers] == [45] * LAYERS


@pytest.mark.parametrize("name", ["h2o", "ada"])
@pytest.mark.parametrize("shared", [False, True])
def test_on_a_device_tables_are_published_at_the_end(name: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels see then is what the host knows, in one piece of memory."""
    policy, found = policy_of(name), []
    for apart in (False, True):
        if apart:
            set_apart(monkeypatch)
        pool = PagePool(DIM, DIM, torch.float32, slots=8)
        batch_cache, other = make(policy, pool), make(policy, pool)
        read(batch_cache, 45)
        if shared:
            batch_cache.copy_to([0], other)
        sent: list[int] = []
        send = publishing.send
        monkeypatch.setattr(publishing, "send", lambda *given, to=sent, by=send: to.append(1) or by(*given))
        batch_cache.run_plans()
        assert len(sent) == 2 * apart
        tables = [one.table for one in batch_cache.layers if one.table is not None]
        for table in tables:
            assert table.lens.tolist() == table.lengths().ravel().tolist()
            assert table.capacities.tolist() == table.budgets().ravel().tolist()
            assert table.regions.table is table.pages
        assert len({table.lens.untyped_storage().data_ptr() for table in tables}) == (1 if apart else LAYERS)
        found.append(held(batch_cache))
    assert_same(found[1], found[0])


def test_tables_are_published_in_one_copy() -> None:
    batch_cache = make(policy_of("ada"), PagePool(DIM, DIM, torch.float32, slots=8))
    read(batch_cache, 45)
    batch_cache.run_plans()
    tables = [one.table for one in batch_cache.layers if one.table is not None]
    before = [[t.clone() for t in (x.pages, x.lens, x.capacities, x.recent, x.head_rules)] for x in tables]
    publishing.publish_all(tables)
    memory = {x.lens.untyped_storage().data_ptr() for x in tables}
    assert len(memory) == 1
    for table, wanted in zip(tables, before, strict=True):
        published = (table.pages, table.lens, table.capacities, table.recent, table.head_rules)
        for x, y in zip(published, wanted, strict=True):
            assert torch.equal(x, y)
            assert x.data_ptr() % 16 == 0
        assert table.regions.lens is table.lens


@pytest.mark.parametrize("together", [True, False])
def test_nan_that_arrives_late_is_refused_at_the_end(
    together: bool, alone: Callable[[BatchCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device nobody waits for the scores before entries move."""
    monkeypatch.setattr(prompt_selection.ReadBack, "is_ready", lambda self: False)
    batch_cache = make(policy_of("h2o"), PagePool(DIM, DIM, torch.float32, slots=8))
    read(batch_cache, 45)
    table = batch_cache.layers[2].table
    assert table is not None
    table.pool.arrays.scores[0][int(table.pages[1, 2]), 3] = torch.nan
    with pytest.raises(NumericsError, match="layer 2"):
        batch_cache.run_plans() if together else alone(batch_cache)


def test_nan_that_arrives_late_is_refused_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_selection.ReadBack, "is_ready", lambda self: False)
    tracker, pool = PositionTracker(), PagePool(DIM, DIM, torch.float32, slots=8)
    layer_cache = LayerCache(3, policy_of("tova"), lambda *_: 12, lambda *_: pool, tracker)
    q, k, v = (torch.randn(1, heads, 45, DIM) for heads in (HEADS * GROUP, HEADS, HEADS))
    q[:, 0, -1] = torch.nan
    layer_cache.attend(q, k, v, None, SHAPE)
    assert int(layer_cache.stored.max()) == 12
    with pytest.raises(NumericsError, match="layer 3: the attention scores"):
        layer_cache.attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], None, SHAPE)


@pytest.mark.parametrize("name", ["full", "h2o", "snapkv", "ada", "streaming"])
@pytest.mark.parametrize("codec", [torch.float32, "int4", "flexgen4"])
def test_no_tensor_is_in_two_places(name: str, codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is not the host's, all layers keep what they keep on the host."""
    monkeypatch.setenv("MILLPOND_KERNELS", "reference")
    policy, found = METHODS.get("full")() if name == "full" else policy_of(name), []
    for far in (False, True):
        with elsewhere() if far else nullcontext():
            storage = codec if isinstance(codec, torch.dtype) else resolve(codec)
            batch_cache = coded(policy, PoolSet(storage, 16, MemoryLimit(None), masses=False))
            read(batch_cache, 330, 2, move=to_far if far else None)
            together = joined(batch_cache, monkeypatch)
            assert together == ([] if name == "full" and codec is torch.float32 else [LAYERS])
            found.append([[near(t) for t in own] for own in held(batch_cache)])
    assert_same(found[1], found[0])


def near(x: Tensor) -> Tensor:
    return x.near if isinstance(x, Far) else x


@pytest.mark.parametrize("name", ["h2o", "snapkv", "ada", "window"])
def test_no_tensor_is_in_two_places_as_a_layer_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_KERNELS", "reference")
    draw, found = torch.Generator().manual_seed(3), []
    new = [torch.randn(2, heads, 45, DIM, generator=draw) for heads in (HEADS * GROUP, HEADS, HEADS)]
    for far in (False, True):
        with elsewhere() if far else nullcontext():
            pools = PoolSet(torch.float32, 16, MemoryLimit(None), masses=False)
            layer_cache = LayerCache(0, policy_of(name), lambda *_: 20, pools.plain, PositionTracker())
            layer_cache.attend(*(to_far(t) if far else t for t in new), None, SHAPE)
            found.append([[near(t) for t in layer_cache.read(sequence)[:4]] for sequence in range(2)])
    assert_same(found[1], found[0])
