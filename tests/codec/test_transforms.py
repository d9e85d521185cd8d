"""Rotation, balance and channel pruning: each leaves attention alone, or errs by exactly what it dropped."""

from __future__ import annotations

import itertools

import pytest
import torch

from millpond.codec.channels import channel_scores, kept_channels, query_balance
from millpond.codec.groups import Coder, integers
from millpond.codec.rotate import hadamard, rotate
from millpond.errors import OptionError


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128])
def test_rotation_keeps_products_and_undoes_itself(dim: int) -> None:
    q, k = torch.randn(5, dim), torch.randn(7, dim)
    torch.testing.assert_close(rotate(q) @ rotate(k).T, q @ k.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotate(rotate(q)), q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(dim) @ hadamard(dim), torch.eye(dim), rtol=1e-5, atol=1e-6)


def test_rotation_needs_a_block() -> None:
    with pytest.raises(OptionError, match="head_dim=20"):
        rotate(torch.zeros(20))


def test_rotation_helps_two_bits_per_token() -> None:
    keys = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0))
    keys[..., 5] *= 10
    coder = Coder(integers(2))
    plain = float((coder.decode(coder.encode(keys)) - keys).norm())
    turned = float((rotate(coder.decode(coder.encode(rotate(keys)))) - keys).norm())
    assert turned < 0.8 * plain


def test_balance_is_an_identity_and_evens_the_peaks() -> None:
    q, k = torch.randn(4, 9, 32), torch.randn(2, 50, 32)
    k[:, :, 3] *= 30
    balance = query_balance(q, k)
    assert balance.shape == (2, 32)
    for h in range(4):
        own = balance[h // 2]
        torch.testing.assert_close((q[h] * own) @ (k[h // 2] / own).T, q[h] @ k[h // 2].T, rtol=1e-4, atol=1e-3)
    peak_q = (q.view(2, 2, 9, 32) * balance[:, None, None]).abs().amax((1, 2))
    torch.testing.assert_close(peak_q, (k / balance[:, None]).abs().amax(1), rtol=1e-4, atol=1e-4)


def test_balance_of_silent_channels_is_bounded() -> None:
    k = torch.randn(1, 5, 8)
    k[..., 2] = 0
    assert bool(torch.isfinite(query_balance(torch.zeros(1, 3, 8), k)).all())


def test_tied_pairs_share_a_factor() -> None:
    balance = query_balance(torch.randn(2, 9, 32), torch.randn(1, 50, 32), tie_pairs=True)
    assert torch.equal(balance[:, :16], balance[:, 16:])


def test_channel_scores_are_norms_of_rank_one_parts() -> None:
    q, k = torch.randn(1, 6, 16).double(), torch.randn(1, 11, 16).double()
    dense = torch.stack([torch.outer(q[0, :, j], k[0, :, j]).square().sum() for j in range(16)])
    torch.testing.assert_close(channel_scores(q, k)[0].double(), dense, rtol=1e-5, atol=1e-5)


def test_dropped_channels_cost_least() -> None:
    scores = torch.rand(1, 32)
    kept = kept_channels(scores, 0.5)[0].tolist()
    assert len(kept) == 16
    assert kept == sorted(kept)
    assert min(scores[0, kept]) >= max(scores[0, [j for j in range(32) if j not in kept]])


def test_pairs_stay_together() -> None:
    scores = torch.rand(3, 64)
    for row, kept in zip(scores, kept_channels(scores, 0.5, pairs=True).tolist(), strict=True):
        assert len(kept) == 32
        low = kept[:16]
        assert kept[16:] == [c + 32 for c in low]
        cost = {c: float(row[c] + row[c + 32]) for c in range(32)}
        assert set(low) == set(sorted(cost, key=cost.__getitem__)[16:])


def test_the_greedy_choice_is_the_best_one() -> None:
    scores = torch.rand(1, 32)
    dropped = set(range(32)) - set(kept_channels(scores, 0.5)[0].tolist())
    least = sum(sorted(scores[0].tolist())[:16])
    assert sum(float(scores[0, j]) for j in dropped) == pytest.approx(least)
    some = itertools.islice(itertools.combinations(range(32), 16), 100)
    assert all(sum(float(scores[0, j]) for j in c) >= least - 1e-6 for c in some)


def test_kept_counts_are_multiples_of_sixteen() -> None:
    assert kept_channels(torch.rand(2, 128), 0.4).shape == (2, 80)
    assert kept_channels(torch.rand(2, 64), 0.0).tolist() == [list(range(64))] * 2
    with pytest.raises(OptionError, match="ratio=1"):
        kept_channels(torch.rand(1, 64), 1.0)


@pytest.mark.parametrize("rows", [1, 2, 2048, 2049])
def test_a_rotation_leaves_its_argument_and_has_the_same_bits_whatever_is_rotated_with_it(rows: int) -> None:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(4))
    before = x.clone()
    turned = rotate(x)
    torch.testing.assert_close(x, before, rtol=0, atol=0)
    torch.testing.assert_close(turned, x @ hadamard(64), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotate(x[-1:]), turned[-1:], rtol=0, atol=0)
    with torch.inference_mode():
        inside = rotate(x[:1])
    torch.testing.assert_close(rotate(inside), x[:1], rtol=1e-5, atol=1e-5)  # its memory is that of inference mode
