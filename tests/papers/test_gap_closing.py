"""H2O at positions inside the cache: gaps close before the trained positions end."""

import pytest
import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.pool import PagePool
from millpond.cache.state import gap_closing
from millpond.cache.state.positions import PositionTracker
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from tests.papers.test_streaming import DIM, HEADS, Rope, text

RECENT, SINKS = 0.5, 1


class Reaching(Rope):
    """A rotation of a model that knows few positions."""

    def __init__(self, reach: int) -> None:
        self.reach = reach


def reference(q: Tensor, k: Tensor, v: Tensor, budget: int, reach: int, least: int) -> tuple[Tensor, list[int]]:
    """One token at a time with unrotated keys, each head for itself: the output, and the steps at which gaps closed."""
    rope, out, closings = Rope(), torch.empty_like(q), []
    for head in range(HEADS):
        places: dict[int, int] = {}  # position in the text -> place
        scores: dict[int, float] = {}
        base = 0
        for t in range(q.shape[2]):
            if t - base >= max(reach, len(places) + least):
                closings += [t] if head == 0 else []
                places = {position: place for place, position in enumerate(sorted(places))}
                base = t - len(places)
            places[t], scores[t] = t - base, 0.0
            held = sorted(places)
            at = torch.tensor([[places[position] for position in held]])
            keys = rope.rotate(k[:, head : head + 1, held], at)
            query = rope.rotate(q[:, head : head + 1, t : t + 1], torch.tensor([[t - base]]))
            weights = torch.softmax(query @ keys.transpose(-1, -2), -1)
            out[:, head, t] = (weights @ v[:, head : head + 1, held])[:, 0, 0]
            for position, weight in zip(held, weights.flatten().tolist(), strict=True):
                scores[position] += weight
            if len(held) > budget:
                free = [p for p in held if p >= SINKS and p not in held[-int(RECENT * budget) :]]
                victim = min(free, key=lambda position: scores[position])
                del places[victim], scores[victim]
    return out, closings


def decode(q: Tensor, k: Tensor, v: Tensor, budget: int, reach: int, last: int = 1) -> Tensor:
    """One token a pass, but for the `last` ones, which come together."""
    policy = METHODS.get("h2o")(sinks=SINKS, recent=RECENT, positions="cache_relative", prefill="greedy")
    pool = PagePool(DIM, DIM, torch.float64, slots=4)
    cache = LayerCache(0, policy, lambda *of: budget, lambda *a: pool, PositionTracker(), rotary=Reaching(reach))
    places = torch.arange(q.shape[2])[None]
    qr, kr = Rope().rotate(q, places), Rope().rotate(k, places)
    steps = q.shape[2] - last
    parts = [*(slice(t, t + 1) for t in range(steps)), slice(steps, q.shape[2])]
    shape = AttentionShape(scale=1.0)
    return torch.cat([cache.attend(qr[:, :, p], kr[:, :, p], v[:, :, p], None, shape) for p in parts], 2)


@pytest.mark.parametrize(("budget", "reach", "least"), [(8, 24, 4), (8, 9, 1), (12, 5, 2), (8, 1000, 4)])
def test_equals_unrotated_keys_that_move_when_gaps_close(
    budget: int, reach: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gap_closing, "MIN_CLOSING_DISTANCE", least)
    q, k, v = text(100)
    expected, closings = reference(q, k, v, budget, reach, least)
    assert (len(closings) > 2) == (reach < 100)
    assert torch.allclose(decode(q, k, v, budget, reach), expected, atol=1e-10)


def test_a_later_pass_of_many_tokens_meets_closed_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gap_closing, "MIN_CLOSING_DISTANCE", 4)
    q, k, v = text(100)
    _, closings = reference(q, k, v, 8, 24, 4)
    q, k, v = (t[:, :, : closings[-1] + 6] for t in (q, k, v))
    expected, _ = reference(q, k, v, 8, 24, 4)
    assert torch.allclose(decode(q, k, v, 8, 24, last=5), expected, atol=1e-10)
    closing = decode(q, k, v, 8, 24, last=6)  # the pass begins where gaps close
    assert torch.allclose(closing, expected, atol=1e-10)


@pytest.mark.parametrize(("budget", "reach"), [(8, 24), (8, 10), (8, 1000)])
def test_positions_that_go_on_inside_the_cache_equal_the_same_definition(budget: int, reach: int) -> None:
    """As an engine with overflow="rolling" does it: keys come after RoPE at positions of the cache, not of the text."""
    q, k, v = text(100)
    expected, closings = reference(q, k, v, budget, reach, 1)
    policy = METHODS.get("h2o")(sinks=SINKS, recent=RECENT, prefill="greedy")
    pool, tracker = PagePool(DIM, DIM, torch.float64, slots=4), PositionTracker()
    cache = LayerCache(0, policy, lambda *of: budget, lambda *a: pool, tracker)
    found, closed = [], []
    for t in range(q.shape[2]):
        if tracker.n_seq and tracker.seen[0] == reach:
            closed.append(t)
            end = cache.least_end(0)
            cache.close_gaps(0, end, Rope())
            tracker.close(0, end)
        at = torch.tensor([[int(tracker.seen[0]) if tracker.n_seq else 0]])
        one = slice(t, t + 1)
        qr, kr = Rope().rotate(q[:, :, one], at), Rope().rotate(k[:, :, one], at)
        found.append(cache.attend(qr, kr, v[:, :, one], None, AttentionShape(scale=1.0)))
    assert closed == closings
    assert torch.allclose(torch.cat(found, 2), expected, atol=1e-10)
    assert int(tracker.seen[0] + tracker.closed[0]) == q.shape[2]


def test_sequences_of_a_batch_keep_their_frames() -> None:
    rope, n = Reaching(24), 3
    ours = gap_closing.GapClosing(rope, 24)
    ours._base = torch.tensor([0, 40, 7]).numpy()
    ours._closed[1] = torch.zeros(1, 1), torch.ones(1, 1)
    chosen = ours.copy([1, 0])
    assert chosen._base.tolist() == [40, 0]
    assert set(chosen._closed) == {0}
    chosen.join(ours.copy([2, 1]), 2)
    assert chosen._base.tolist() == [40, 0, 7, 40]
    assert set(chosen._closed) == {0, n}
    assert ours.copy([])._base.tolist() == []
