"""Knorm by hand: the shortest keys stay."""

import torch

from millpond.methods import METHODS
from millpond.policy.scores.key_geometry import KeyNorm
from tests.helpers.papers.keyed import best, run, sets, text, view

knorm = METHODS.get("knorm")


def test_by_hand() -> None:
    keys = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [2.0, 0.0], [6.0, 8.0], [1.0, 0.0]]])
    assert KeyNorm().score(view(keys), 0).tolist() == [[-5, -1, -2, -10, -1]]
    q = torch.zeros(1, 5, 2)
    assert sets(run(knorm(), 3, q, keys, keys)) == [[1, 2, 4]]
    assert sets(run(knorm(), 1, q, keys, keys)) == [[4]]  # of two equal keys the newer
    assert sets(run(knorm(sinks=1, recent=1), 3, q, keys, keys)) == [[0, 1, 4]]


def test_each_head_has_its_own_set() -> None:
    q, k, v = text()
    expected = [best([-float((x @ x) ** 0.5) for x in k[h]], 9, {0, 1, 38, 39}) for h in range(2)]
    assert sets(run(knorm(sinks=2, recent=2), 9, q, k, v)) == expected
    assert expected[0] != expected[1]


def test_grows_while_decoding_or_holds_the_shortest_of_all() -> None:
    """A norm does not change, so evicting step by step ends where one plan over the whole text would."""
    q, k, v = text(1)
    assert run(knorm(), 9, q, k, v, prompt=20).stored.tolist() == [[29]]
    stepwise = run(knorm(decode="evict"), 9, q, k, v, prompt=20)
    assert sets(stepwise) == sets(run(knorm(), 9, q, k, v))


def test_turning_keys_changes_nothing() -> None:
    """The norm is that before RoPE as well."""
    q, k, v = text()
    turn = torch.linalg.qr(torch.randn(40, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    assert sets(run(knorm(), 9, q, (turn @ k[..., None])[..., 0], v)) == sets(run(knorm(), 9, q, k, v))


def test_lengths_equal_but_for_rounding_leave_the_newest() -> None:
    key = torch.tensor([0.3, -1.7, 0.9, 2.2])
    keys = key * (1 + 2**-21 * torch.tensor([3.0, 0, -4, 1, 4, -2]))[:, None]
    keys[2] *= 0.999  # shorter by more than rounding
    kept = sets(run(knorm(), 3, torch.zeros(1, 6, 4), keys[None], keys[None]))
    assert kept == [[2, 4, 5]]
