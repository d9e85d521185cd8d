"""Caches of sequences that join, part, share and leave the pool: each goes on as it would have alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millpond.cache.batch_cache import BatchCache
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.pool import PagePool
from millpond.cache.state.positions import PositionTracker
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from millpond.policy.policy import Policy

LAYERS, HEADS, GROUP, DIM, BUDGET = 2, 2, 2, 4, 8
SHAPE = AttentionShape(0.5)


def make(policy: Policy, pool: PagePool) -> BatchCache:
    tracker = PositionTracker()
    return BatchCache(
        [
            LayerCache(i, policy, lambda *_: BUDGET, lambda *_: pool, tracker, between_chunks=False)
            for i in range(LAYERS)
        ],
        tracker,
    )


def tokens(seed: int, n: int, n_seq: int = 1) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of `n` tokens for every layer."""
    draw = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(n_seq, heads, n, DIM, generator=draw) for heads in (HEADS * GROUP, HEADS, HEADS))
        for _ in range(LAYERS)
    ]  # type: ignore[misc]


def run(batch_cache: BatchCache, new: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    batch_cache.begin(torch.zeros(new[0][0].shape[0], new[0][0].shape[2], dtype=torch.int64))
    return torch.stack(
        [layer_cache.attend(*own, None, SHAPE) for layer_cache, own in zip(batch_cache.layers, new, strict=True)]
    )


def read(policy: Policy, pool: PagePool, seed: int, length: int) -> BatchCache:
    batch_cache = make(policy, pool)
    batch_cache.reading = True
    run(batch_cache, tokens(seed, length))
    batch_cache.run_plans()
    return batch_cache


def together(seeds: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    parts = [tokens(seed, 1) for seed in seeds]
    return [tuple(torch.cat([part[i][j] for part in parts]) for j in range(3)) for i in range(LAYERS)]  # type: ignore[misc]


@pytest.mark.parametrize("method", ["full", "h2o", "snapkv", "rkv", "cam", "no_heavy", "infllm"])
def test_joined_parted_and_carried_as_alone(method: str) -> None:
    policy = METHODS.get(method)(**({"window": 4} if method in ("snapkv", "rkv") else {}))
    pool = PagePool(DIM, DIM, torch.float32, slots=4, masses=policy.mass_bias)
    lengths = {1: 13, 2: 21, 3: 9}
    single = {seed: read(policy, pool, seed, n) for seed, n in lengths.items()}
    group = make(policy, pool)
    for seed, n in lengths.items():
        group.join(read(policy, pool, seed, n))
    members = [1, 2, 3]
    for step in range(12):
        if step == 3:
            away = make(policy, pool)
            group.part([1], away)
            away.swap_out()
            members.remove(2)
        if step == 7:
            need = away.pages_to_swap_in()
            before = pool.n_live
            away.swap_in()
            assert pool.n_live - before == need[pool]
            group.join(away)
            members.append(2)
        out = run(group, together([100 * step + seed for seed in members]))
        for place, seed in enumerate(members):
            alone = run(single[seed], tokens(100 * step + seed, 1))
            torch.testing.assert_close(out[:, place], alone[:, 0])
    pool.check_integrity([c.table.held() for s in (group, *single.values()) for c in s.layers if c.table is not None])
    for batch_cache in (group, *single.values()):
        batch_cache.clear()
    assert pool.n_live == 0


@pytest.mark.parametrize("method", ["full", "h2o"])
def test_copies_share_pages_until_they_write(method: str) -> None:
    policy = METHODS.get(method)()
    pool = PagePool(DIM, DIM, torch.float32, slots=4)
    batch_cache = read(policy, pool, 1, 21)
    before = pool.n_live
    batch_cache.select([0, 0, 0])
    assert pool.n_live == before
    assert batch_cache.n_seq == 3
    need = batch_cache.pages_for_step()[pool]
    run(batch_cache, together([7, 8, 9]))
    assert before < pool.n_live <= before + need
    batch_cache.select([])
    assert pool.n_live == 0
    assert batch_cache.n_seq == 0


def test_a_part_of_a_prompt_may_be_one_token() -> None:
    policy = METHODS.get("h2o")()
    pool = PagePool(DIM, DIM, torch.float32, slots=4)
    whole, parts = make(policy, pool), make(policy, pool)
    new = tokens(1, 12)
    for batch_cache, cuts in ((whole, [12]), (parts, [5, 1, 1, 4, 1])):
        batch_cache.reading = True
        begin = 0
        for n in cuts:
            run(batch_cache, [tuple(t[:, :, begin : begin + n] for t in own) for own in new])  # type: ignore[misc]
            begin += n
        assert batch_cache.held().tolist() == [[[12, 12]]] * LAYERS
        batch_cache.run_plans()
        assert batch_cache.held().tolist() == [[[BUDGET, BUDGET]]] * LAYERS
    for a, b in zip(whole.layers, parts.layers, strict=True):
        assert torch.equal(a.read(0).positions, b.read(0).positions)
