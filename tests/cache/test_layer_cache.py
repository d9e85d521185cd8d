"""LayerCache on its own: chunk peaks, sharing, going back, read order, errors."""

import pytest
import torch
from torch import Tensor

from millpond.cache.layer.draft_rollback import DraftRollback
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.pool import PagePool
from millpond.cache.state.positions import PositionTracker
from millpond.errors import CacheMismatchError, PoolFullError
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS

HEADS, KV, DIM = 4, 2, 8
SHAPE = AttentionShape(scale=DIM**-0.5)


def make(method: str, budget: int, *, limit_pages: int | None = None, slots: int = 4, **options: object) -> LayerCache:
    page = PagePool(DIM, DIM, torch.float64, slots=slots).page_bytes
    limit = None if limit_pages is None else limit_pages * page
    pool = PagePool(DIM, DIM, torch.float64, slots=slots, limit_bytes=limit)
    return LayerCache(0, METHODS.get(method)(**options), lambda *of: budget, lambda *a: pool, PositionTracker())


def tokens(n: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(batch, HEADS, n, DIM, generator=g, dtype=torch.float64)
    k, v = torch.randn(2, batch, KV, n, DIM, generator=g, dtype=torch.float64)
    return q, 2 * k, v


def run(cache: LayerCache, qkv: tuple[Tensor, Tensor, Tensor], first: int, last: int) -> Tensor:
    return cache.attend(*(t[:, :, first:last] for t in qkv), None, SHAPE)


def test_read_is_in_the_order_of_positions() -> None:
    cache, qkv = make("h2o", 6, sinks=1, recent=2), tokens(20)
    run(cache, qkv, 0, 8)
    for t in range(8, 20):
        run(cache, qkv, t, t + 1)
    dense = cache.read(0)
    assert (dense.positions.diff(dim=1) > 0).all()
    for h in range(KV):
        assert torch.equal(dense.keys[h], qkv[1][0, h, dense.positions[h].long()])
        assert torch.equal(dense.values[h], qkv[2][0, h, dense.positions[h].long()])


def test_pages_left_by_one_sequence_serve_another() -> None:
    cache, qkv = make("h2o", 8, limit_pages=16, sinks=0), tokens(200)
    run(cache, qkv, 0, 30)
    for t in range(30, 200):
        run(cache, qkv, t, t + 1)
    assert cache.table is not None
    assert cache.table.pool.n_live == KV * 2


def test_full_pool_in_mid_generation_leaves_the_cache_readable() -> None:
    cache, qkv = make("full", 0, limit_pages=6), tokens(20)
    run(cache, qkv, 0, 10)
    run(cache, qkv, 10, 11)
    run(cache, qkv, 11, 12)
    with pytest.raises(PoolFullError, match="stays readable"):
        run(cache, qkv, 12, 13)
    assert cache.read(0).positions.tolist() == [list(range(12))] * KV
    assert cache.table is not None
    cache.table.pool.check_integrity([cache.table.held()])


@pytest.mark.parametrize("method", ["full", "h2o", "tova", "window"])
def test_selected_sequences_go_their_own_ways(method: str) -> None:
    """Beams: copies share pages until they differ, and each equals a cache that was never shared."""
    qkv, order = tokens(24, batch=2), [1, 1, 0]
    options = {"sinks": 1} if method in ("h2o", "window") else {}
    cache, alone = make(method, 7, **options), make(method, 7, **options)
    run(cache, qkv, 0, 10)
    cache.select(order)
    cache.tracker.select(order)
    run(alone, tuple(t[order] for t in qkv), 0, 10)  # type: ignore[arg-type]
    later = tokens(24, batch=3, seed=5)
    for t in range(10, 24):
        assert torch.allclose(run(cache, later, t, t + 1), run(alone, later, t, t + 1), atol=1e-12)
    assert torch.equal(cache.read(1).positions, alone.read(1).positions)
    assert cache.table is not None
    cache.table.pool.check_integrity([cache.table.held()])


@pytest.mark.parametrize("method", ["full", "h2o", "tova", "window", "snapkv"])
def test_draft_tokens_are_taken_back_exactly(method: str) -> None:
    options = {"window": 3, "kernel": 3} if method == "snapkv" else {}
    cache, plain, qkv = make(method, 8, **options), make(method, 8, **options), tokens(40)
    draft_rollback = DraftRollback(cache.tracker, recording=True)
    run(plain, qkv, 0, 10)
    parts = [t[:, :, :10] for t in qkv]
    draft_rollback.draft = 0
    draft_rollback.attend(cache, *parts, None, SHAPE)
    at = 10
    wrong = tokens(40, seed=8)
    for accepted, draft in [(2, 4), (0, 3), (4, 4), (1, 1), (3, 5)]:
        good = [t[:, :, at : at + 1 + accepted] for t in qkv]
        bad = [t[:, :, at : at + draft - accepted] for t in wrong]
        draft_rollback.draft = draft
        out = draft_rollback.attend(cache, *(torch.cat([g, b], 2) for g, b in zip(good, bad, strict=True)), None, SHAPE)
        draft_rollback.crop([cache], draft - accepted)
        for i in range(1 + accepted):
            assert torch.allclose(out[:, :, i : i + 1], run(plain, qkv, at, at + 1), atol=1e-12)
            at += 1
        assert torch.equal(cache.read(0).positions, plain.read(0).positions)
        assert torch.allclose(cache.read(0).scores, plain.read(0).scores, atol=1e-6)
        assert cache.columns == plain.columns == at
        assert cache.table is not None
        cache.table.pool.check_integrity([cache.table.held()])


def test_going_back_without_a_recording_is_refused() -> None:
    cache, qkv = make("h2o", 6, sinks=1), tokens(20)
    run(cache, qkv, 0, 10)
    with pytest.raises(CacheMismatchError, match="cannot take back 2 tokens"):
        DraftRollback(cache.tracker).crop([cache], 2)


def test_another_batch_size_is_refused() -> None:
    cache = make("full", 0)
    run(cache, tokens(5, batch=2), 0, 5)
    with pytest.raises(CacheMismatchError, match="batch of 3 sequences met a cache of 2"):
        run(cache, tokens(6, batch=3), 5, 6)


def test_sliding_window_keeps_no_more_than_it_sees() -> None:
    shape = AttentionShape(scale=DIM**-0.5, window=5)
    cache, qkv = make("full", 0), tokens(30)
    cache.attend(*(t[:, :, :12] for t in qkv), None, shape)
    for t in range(12, 30):
        out = cache.attend(*(x[:, :, t : t + 1] for x in qkv), None, shape)
        assert cache.read(0).positions.tolist() == [list(range(t - 4, t + 1))] * KV
        near = slice(t - 4, t + 1)
        logits = qkv[0][:, :, t : t + 1].view(1, KV, 2, DIM) @ qkv[1][:, :, near].transpose(-1, -2) * shape.scale
        expected = torch.softmax(logits, -1) @ qkv[2][:, :, near]
        assert torch.allclose(out.view(1, KV, 2, DIM), expected, atol=1e-12)
