"""TOVA by hand: the last row decides, one set for all heads."""

import torch

from millpond.methods import METHODS
from tests.helpers.papers.fixture import LOGITS, N, feed, kept, make_layer_cache, run

tova = METHODS.get("tova")


def test_last_row_decides() -> None:
    assert run(tova(), budget=3) == [1, 2, 5]


def test_all_heads_hold_the_same_positions_at_every_step() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 40, 40, dtype=torch.float64) * 2
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        cache = make_layer_cache(tova(), budget=6)
        feed(cache, logits[order], 0, 12)
        for t in range(12, 40):
            feed(cache, logits[order], t, t + 1)
            assert all(kept(cache, h) == kept(cache, 0) for h in range(4))
            assert len(kept(cache)) == 6
        if order == [0, 1, 2, 3]:
            expected = kept(cache)
    assert kept(cache) == expected


def test_the_newest_entry_may_leave_unless_pinned() -> None:
    logits = LOGITS.clone()
    logits[N - 1, N - 1] = -30.0
    for pin, stays in ((False, False), (True, True)):
        cache = make_layer_cache(tova(pin_newest=pin), budget=3)
        feed(cache, logits[None], 0, N - 1)
        feed(cache, logits[None], N - 1, N)
        assert (N - 1 in kept(cache)) is stays


def test_token_by_token_reading_of_the_prompt() -> None:
    """By hand: full rows until three are held, then the lowest of the renormalised row leaves."""
    once, greedy = run(tova(), budget=3), run(tova(prefill="greedy"), budget=3)
    held: list[int] = []
    for t in range(N):
        held.append(t)
        row = torch.softmax(LOGITS[t, held], 0)
        if len(held) > 3:
            held.pop(int(row.argmin()))
    assert greedy == held
    assert greedy != once
