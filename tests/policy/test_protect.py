"""What no score can evict, and the smallest budget that leaves room for it."""

import pytest
import torch

from millpond.errors import BudgetError, OptionError
from millpond.policy.protect import Protect
from millpond.policy.view import View


@pytest.mark.parametrize(
    ("protect", "budget", "newest"),
    [
        (Protect(recent=0.5), 10, 5),
        (Protect(recent=0.5), 11, 5),
        (Protect(recent=0.5, sinks=4), 6, 2),  # a share never asks for more than the sinks leave
        (Protect(recent=3), 10, 3),
        (Protect(recent=3, grace=5), 10, 5),
        (Protect(recent=1.0), 7, 7),
    ],
)
def test_newest(protect: Protect, budget: int, newest: int) -> None:
    assert protect.newest(budget) == newest


def test_mask() -> None:
    view = View(torch.tensor([[0, 1, 5, 8, 9, -1]], dtype=torch.int32), None, seen=10, layer=0)
    assert Protect(sinks=1, recent=2).mask(view, 5).tolist() == [[True, False, False, True, True, False]]


@pytest.mark.parametrize(
    ("turn", "budget", "kept"),
    [
        (3, 20, 3),
        (10, 22, 10),  # half of what two sinks leave
        (11, 22, 1),  # more than that: the scores decide, behind `recent`
        (64, 1000, 64),
        (65, 1000, 1),  # a text, not a question
        (0, 20, 1),
    ],
)
def test_a_short_later_turn_is_protected_whole(turn: int, budget: int, kept: int) -> None:
    view = View(torch.arange(100, dtype=torch.int32)[None], None, seen=100, layer=0)
    mask = Protect(sinks=2, recent=1).mask(view, budget, turn)[0]
    assert mask.nonzero()[:, 0].tolist() == [0, 1, *range(100 - kept, 100)]


def test_minimum_is_what_check_accepts() -> None:
    for protect in (Protect(sinks=4, recent=8), Protect(sinks=2, recent=0.9), Protect(recent=2, grace=6), Protect()):
        protect.check(protect.minimum())
        if protect.minimum() > 1:
            with pytest.raises(BudgetError):
                protect.check(protect.minimum() - 1)


@pytest.mark.parametrize("bad", [{"sinks": -1}, {"recent": -2}, {"grace": -1}])
def test_negative_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="must not be negative"):
        Protect(**bad)


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(OptionError, match="share of the budget"):
        Protect(recent=1.5)
