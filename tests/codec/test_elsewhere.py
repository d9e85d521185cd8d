"""A layer with codes on a device that is not the host's: the same entries and outputs, and no tensor in two places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.serialization import from_tensors, to_tensors
from millpond.cache.swap import copy_out, release_all, restore
from tests.helpers.codec.elsewhere import ELSEWHERE, Far, elsewhere, to_far
from tests.helpers.codec.layers import check, feed, make, parts, positions, tokens
from tests.helpers.device_memory import set_apart


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_KERNELS", "reference")


def near(x: Tensor) -> Tensor:
    return x.near if isinstance(x, Far) else x


def run(cache: LayerCache, qkv: tuple[Tensor, Tensor, Tensor], first: int, last: int) -> list[Tensor]:
    return [near(feed(cache, qkv, t, t + 1)).clone() for t in range(first, last)]


def assert_same(here: LayerCache, there: LayerCache) -> None:
    ours, theirs = parts(here), parts(there)
    assert theirs[0].lens.device == ELSEWHERE
    assert theirs[1].regions().table.device == ELSEWHERE
    for s in range(ours[0].n_seq):
        assert positions(here, s) == positions(there, s)
        for a, b in zip(here.read(s)[:3], there.read(s)[:3], strict=True):
            assert torch.equal(a, near(b))
    assert np.array_equal(ours[1].lens, theirs[1].lens)
    assert np.array_equal(ours[1].n_evicted, theirs[1].n_evicted)
    assert np.array_equal(near(theirs[0].lens).numpy(), ours[0].lengths().ravel())
    assert np.array_equal(near(theirs[1].regions().dead).numpy(), ours[1].n_evicted)
    check(there)


def tour(cache: LayerCache, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor) -> list[Tensor]:
    """What a layer gives while pages fall due, sequences are chosen, and pages leave the pool and come back."""
    outs = [near(feed(cache, qkv, 0, 188, mask=mask)), *run(cache, qkv, 188, 195)]
    outs += [near(feed(cache, qkv, 195, 200))]
    order = torch.tensor([1, 0, 1]).to(qkv[0].device)
    cache.select(order.tolist())
    cache.tracker.select(order.tolist())
    q, k, v = (t[order] for t in qkv)
    outs += run(cache, (q, k, v), 200, 203)
    table = parts(cache)[0]
    restore(table, release_all(table, copy_out(table)))
    if cache.truncatable:
        cache.tracker.rewind(cache.columns - 2, cache.tracker.seen - 2)
        cache.truncate(2, np.full(3, 2))
    return [*outs, *run(cache, (q, k, v), 203, 206)]


CASES = [
    ("int4", "h2o", {"sinks": 1}),
    ("kivi2", "full", {}),
    ("kvquant3", "full", {}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("int4", "full", {}),
            ("flexgen4", "window", {"sinks": 0}),
            ("fp8", "tova", {}),
            ("think", "full", {}),
            ("mikv", "h2o", {}),
            ("rotated4", "h2o", {}),
            ("kvquant3", "h2o", {}),
        ]
    ),
]


@pytest.mark.parametrize(("codec", "method", "options"), CASES)
def test_decoding_elsewhere(codec: str, method: str, options: dict[str, Any]) -> None:
    """Every output and every entry is the one of the host."""
    qkv = tokens(210, batch=2, seed=5)
    mask = torch.ones(2, 188, dtype=torch.bool)
    mask[1, :30] = False
    budget = 10**6 if method == "full" else 160
    here, there = (make(codec, method, budget, **options) for _ in range(2))
    outs = tour(here, qkv, mask)
    with elsewhere():
        far: Any = tuple(to_far(t) for t in qkv)
        found = tour(there, far, to_far(mask))
        assert_same(here, there)
    assert all(torch.equal(a, b) for a, b in zip(outs, found, strict=True))


def test_a_tensor_in_two_places_would_be_seen() -> None:
    with elsewhere():
        x = torch.zeros(3, device=ELSEWHERE)
        assert isinstance(x, Far)
        assert x.cpu().numpy().tolist() == [0, 0, 0]
        with pytest.raises(AssertionError, match="elsewhere and of such on the host"):
            x + torch.ones(3)
        with pytest.raises(TypeError, match="cpu"):
            x.numpy()


@pytest.mark.parametrize("method", ["tova", "random"])
def test_entries_are_quantized_at_the_same_steps(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of victims that lie in both parts, the host asks how many lay in which before a page falls due, and no later."""
    monkeypatch.setenv("MILLPOND_KERNELS", "auto")
    qkv, steps = tokens(520, batch=2, seed=5), []
    for apart in (False, True):
        cache = make("fp8", method, 150)
        with pytest.MonkeyPatch.context() as patch:
            counts = set_apart(patch) if apart else {}
            outs, lens = [feed(cache, qkv, 0, 188)], []
            for t in range(188, 520):
                outs.append(feed(cache, qkv, t, t + 1))
                table, quantized = parts(cache)
                lens.append((table.lens.tolist(), quantized.lens.tolist(), quantized.regions().dead.tolist()))
            steps.append((outs, lens, [positions(cache, s) for s in range(2)]))
    assert steps[0][1:] == steps[1][1:]
    assert all(map(torch.equal, steps[0][0], steps[1][0]))
    assert len({tuple(lens[1]) for lens in steps[0][1]}) > 3
    assert counts["lengths"] < 332 / 3


@pytest.mark.parametrize(("codec", "method"), [("int4", "h2o"), ("think", "full")])
def test_a_text_put_away_elsewhere_goes_on(codec: str, method: str) -> None:
    """What one layer elsewhere puts away fills another there, and both go on alike."""
    budget, qkv = 10**6 if method == "full" else 160, tokens(196)
    with elsewhere():
        far: Any = tuple(to_far(t) for t in qkv)
        first, second = (make(codec, method, budget) for _ in range(2))
        feed(first, far, 0, 188)
        run(first, far, 188, 190)
        stored = to_tensors(first)
        assert not any(isinstance(t, Far) for t in stored.values())
        second.tracker.begin_with(190)
        from_tensors(second, stored, 190, ELSEWHERE)
        second.columns = 190
        assert parts(second)[1].regions().table.device == ELSEWHERE
        for a, b in zip(run(first, far, 190, 196), run(second, far, 190, 196), strict=True):
            assert torch.equal(a, b)
