"""KeyDiff by hand: keys that point away from the mean direction stay."""

import pytest
import torch

from millpond.methods import METHODS
from millpond.policy.scores.key_geometry import KeyDifference
from tests.helpers.papers.keyed import best, cosine, run, sets, text, view

keydiff = METHODS.get("keydiff")


def test_by_hand() -> None:
    """Two keys along x, one along y, one halfway: the anchor is (2 + r, 1 + r) / 4 with r = 1 / sqrt 2."""
    keys = torch.tensor([[[2.0, 0.0], [0.0, 3.0], [5.0, 0.0], [1.0, 1.0]]])
    r = 0.5**0.5
    a = torch.tensor([2 + r, 1 + r])
    a = a / (a @ a) ** 0.5
    expected = [-float(a[0]), -float(a[1]), -float(a[0]), -float(r * (a[0] + a[1]))]
    assert KeyDifference().score(view(keys), 0)[0].tolist() == pytest.approx(expected, abs=1e-6)
    q = torch.zeros(1, 4, 2)
    assert sets(run(keydiff(), 1, q, keys, keys)) == [[1]]
    assert sets(run(keydiff(), 2, q, keys, keys)) == [[1, 2]]
    assert sets(run(keydiff(), 3, q, keys, keys)) == [[0, 1, 2]]


def test_ranks_by_the_sum_of_cosines_with_all_others() -> None:
    q, k, v = text(n=24)
    for h in range(2):
        total = [-sum(cosine(k[h, i], k[h, j]) for i in range(24) if i != j) for j in range(24)]
        assert sets(run(keydiff(sinks=1), 7, q, k, v))[h] == best(total, 7, {0})


def test_length_of_keys_does_not_matter() -> None:
    q, k, v = text()
    scale = torch.linspace(0.1, 9, 40, dtype=torch.float64)[:, None]
    assert sets(run(keydiff(), 9, q, k * scale, v)) == sets(run(keydiff(), 9, q, k, v))


def test_what_is_not_there_does_not_move_the_anchor() -> None:
    """A head with fewer entries is scored as if it were alone, whatever lies in its empty columns."""
    _, k, _ = text(n=10)
    positions = torch.arange(10, dtype=torch.int32).repeat(2, 1)
    positions[1, 6:] = -1
    k[1, 6:] = float("nan")
    both = KeyDifference().score(view(k, None, positions, seen=10), 0)
    alone = KeyDifference().score(view(k[1:, :6], seen=10), 0)
    assert torch.equal(both[1:, :6], alone)


def test_evicting_at_each_step_compares_what_is_kept_with_itself() -> None:
    q, k, v = text(1, n=30)
    cache = run(keydiff(decode="evict", recent=1), 8, q, k, v, prompt=20)
    held = best([-sum(cosine(k[0, i], k[0, j]) for i in range(20)) for j in range(20)], 8, {19})
    for t in range(20, 30):
        places = [*held, t]
        total = [-sum(cosine(k[0, i], k[0, j]) for i in places) for j in places]
        held = [places[i] for i in best(total, 8, {8})]
    assert sets(cache) == [held]
