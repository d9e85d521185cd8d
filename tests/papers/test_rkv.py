"""R-KV: redundancy by hand and in loops, the blend with importance, decoding with the newest queries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.methods.rkv import ImportanceAndRedundancy, mean_similarity
from tests.helpers.papers.keyed import best, cosine, run, sets, text, view

rkv = METHODS.get("rkv")


def plain(keys: Tensor, threshold: float = 0.5, spared: int = 1) -> list[float]:
    """mean_i S_ij over keys (n, D), entry by entry."""
    n = len(keys)
    s = [[0.0 if i == j else cosine(keys[i], keys[j]) for j in range(n)] for i in range(n)]
    for row in s:
        similar = [j for j in range(n) if row[j] > threshold]
        for j in similar[::-1][:spared]:
            row[j] = 0.0
    return [sum(s[i][j] for i in range(n)) / n for j in range(n)]


def softmax(value: list[float]) -> list[float]:
    total = sum(math.exp(a) for a in value)
    return [math.exp(a) / total for a in value]


def valid(k: Tensor) -> Tensor:
    return torch.ones(k.shape[:2], dtype=torch.bool)


def test_redundancy_by_hand() -> None:
    """Three copies and one key of its own: the newest copy is spared by the two others, and spares the one before."""
    keys = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]])
    assert mean_similarity(keys, valid(keys), 0.5, 1)[0].tolist() == pytest.approx([0.5, 0.25, 0, 0], abs=1e-6)
    assert mean_similarity(keys, valid(keys), 0.5, 0)[0].tolist() == pytest.approx([0.5, 0.5, 0, 0.5], abs=1e-6)
    assert mean_similarity(keys, valid(keys), 0.5, 2)[0].tolist() == pytest.approx([0, 0, 0, 0], abs=1e-6)


@pytest.mark.parametrize("spared", [0, 1, 3])
def test_redundancy_against_loops(spared: int) -> None:
    _, k, _ = text(n=30)
    found = mean_similarity(k, valid(k), 0.5, spared)
    for h in range(2):
        assert found[h].tolist() == pytest.approx(plain(k[h], 0.5, spared), abs=1e-9)


def test_what_is_not_there_is_not_redundant() -> None:
    _, k, v = text(n=12)
    positions = torch.arange(12, dtype=torch.int32).repeat(2, 1)
    positions[1, 7:] = -1
    signal = torch.rand(2, 12)
    score = ImportanceAndRedundancy()
    both = score.score(view(k, v, positions, signal=signal, seen=12), 0)
    alone = score.score(view(k[1:, :7], v[1:, :7], signal=signal[1:, :7], seen=12), 0)
    assert torch.allclose(both[1:, :7], alone, atol=1e-12)


def test_copies_of_a_key_leave_before_others() -> None:
    """With importance out of the way the newest copy stays and the older ones leave."""
    make = torch.Generator().manual_seed(0)
    k = torch.linalg.qr(torch.randn(20, 20, generator=make, dtype=torch.float64)).Q[None].clone()
    k[0, [3, 8, 15]] = k[0, 2]
    cache = run(rkv(blend=0.0, window=1, sinks=0), 17, torch.zeros_like(k), k, k)
    assert sets(cache) == [[j for j in range(20) if j not in (2, 3, 8)]]


def test_blend_by_hand() -> None:
    """Importance of two query heads by the larger, pooled over three; lambda 0.3; the window stays."""
    q, k, v = text(heads=2, n=20)
    k, v = k[:1], v[:1]
    policy = rkv(blend=0.3, window=4, kernel=3)
    probability = torch.softmax((q @ k.transpose(1, 2)).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf), 2)
    mean = (probability.amax(0)[16:].sum(0) / 4).tolist()
    pooled = [max(mean[max(0, j - 1) : min(16, j + 2)]) for j in range(16)]
    redundant = softmax(plain(k[0]))
    value = [0.3 * a - 0.7 * b for a, b in zip(pooled, redundant, strict=False)]
    assert sets(run(policy, 10, q, k, v)) == [best([*value, 0, 0, 0, 0], 10, {16, 17, 18, 19})]


@pytest.mark.parametrize("buffer", [1, 5])
def test_decoding_plans_with_the_newest_queries(buffer: int) -> None:
    """When the buffer is full: the last two queries over what is kept, redundancy among what is kept."""
    q, k, v = text(heads=1, n=30)
    cache = run(rkv(window=2, kernel=1, blend=0.5, buffer=buffer), 8, q, k, v, prompt=16)

    def plan(places: list[int], t: int) -> list[int]:
        attention = [0.0] * len(places)
        for i in (t - 1, t):
            seen = [j for j in places if j <= i]
            p = softmax([float(q[0, i] @ k[0, j]) for j in seen])
            for j, a in zip(seen, p, strict=True):
                attention[places.index(j)] += a / 2
        redundant = softmax(plain(k[0, places]))
        value = [0.5 * a - 0.5 * b for a, b in zip(attention, redundant, strict=True)]
        return [places[i] for i in best(value, 8, {len(places) - 2, len(places) - 1})]

    held = plan(list(range(16)), 15)
    for t in range(16, 30):
        held = [*held, t]
        if len(held) - 8 == buffer:
            held = plan(held, t)
    assert sets(cache) == [held]


def test_grows_when_told_to() -> None:
    q, k, v = text(n=30)
    assert run(rkv(decode="grow"), 12, q, k, v, prompt=20).stored.tolist() == [[22, 22]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blend": 1.5}, "blend=1.5 must be 0 to 1"),
        ({"kernel": 4}, "kernel=4 must be odd"),
        ({"window": 0}, "window=0 must be 1 to 1,024"),
        ({"spared": -1}, "spared=-1 must be 0 to 16"),
        ({"buffer": 0}, "buffer=0 must be 1 to 16,777,216"),
        ({"buffer": 4, "decode": "grow"}, "nothing leaves while decoding"),
    ],
)
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        rkv(**options)
