"""Levels of least squared error, and the bits that dimensions get by them."""

from __future__ import annotations

import pytest
import torch

from millpond.codec.transform.allocation import allocate
from millpond.codec.transform.levels import cuts_of, distortions, fit_levels, nearest_codes, rows_by_bits
from millpond.codec.transform.storage_codec import parse_storage_codec
from millpond.errors import OptionError

#: Distortion of Lloyd-Max quantizers of the normal distribution (Max, 1960, table 1), by bits.
MAX_1960 = (1.0, 0.3634, 0.1175, 0.03454, 0.009497)


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_levels_of_the_normal_distribution_are_those_of_max() -> None:
    levels = fit_levels([normal(1 << 17)] * 7)
    found = distortions(normal(200_000, 1)[:, None], levels)[0]
    torch.testing.assert_close(found[:5], torch.tensor(MAX_1960), rtol=0.02, atol=0)
    assert (found[1:] < found[:-1]).all()
    torch.testing.assert_close(levels[0], torch.tensor([-0.7979, 0.7979]), rtol=0.02, atol=0)


@pytest.mark.parametrize("samples", [torch.zeros(40), torch.tensor([1.0, 2.0]), torch.arange(3.0).repeat(50)])
def test_levels_of_few_distinct_numbers_are_these(samples: torch.Tensor) -> None:
    levels = fit_levels([samples] * 7)
    assert all(len(table) == 1 << bits for bits, table in enumerate(levels, 1))
    assert all(bool((table[1:] >= table[:-1]).all()) for table in levels)
    error = levels[-1][nearest_codes(samples, levels[-1]).long()] - samples
    assert float(error.abs().max()) < 1e-6


def test_levels_are_fitted_to_the_dimensions_that_have_as_many_bits() -> None:
    """Each has a bit less than the one before it, by its variance: 5, 4, 3, 2, 1, and then none."""
    variances = 4.0 ** torch.arange(10, -30, -1)
    assert all(len(rows) == 8 for rows in rows_by_bits(variances, 15 / 40))
    wide = rows_by_bits(variances.repeat_interleave(6), 15 / 40)
    assert wide[0].tolist() == list(range(18, 36))
    assert wide[2].tolist() == list(range(6, 24))


def test_a_code_is_the_number_of_cuts_below() -> None:
    levels = torch.tensor([-1.0, 0.0, 2.0, 8.0])
    assert cuts_of(levels).tolist() == [-0.5, 1.0, 5.0]
    assert nearest_codes(torch.tensor([-9.0, -0.5, -0.4, 1.0, 1.1, 99.0]), levels).tolist() == [0, 0, 1, 1, 2, 3]


def test_bits_go_where_a_bit_lowers_the_distortion_most() -> None:
    """By search over all choices of bits, where the drops fall."""
    first, second = torch.tensor([[8.0, 2.0, 0.5], [1.0, 0.3, 0.1]]), torch.tensor([[4.0, 1.0, 0.9]])
    for total in range(7):
        given = torch.cat(allocate([first, second], total)).tolist()
        table = torch.cat([first, second])
        best = min(
            (float(table[0, a] + table[1, b] + table[2, c]), [a, b, c])
            for a in range(3)
            for b in range(3)
            for c in range(3)
            if a + b + c == total
        )
        assert given == best[1]


def test_a_bit_of_a_part_counts_as_often_as_it_has_tokens() -> None:
    parts = [torch.tensor([[8.0, 2.0, 0.5], [1.0, 0.3, 0.1]]), torch.tensor([[4.0, 1.0, 0.9]])]
    for total in range(20):
        given = allocate(parts, total, [5, 2])
        assert sum(n * int(bits.sum()) for n, bits in zip([5, 2], given, strict=True)) <= total
        # the same order of bits as with one token each
        assert any(
            all(torch.equal(a, b) for a, b in zip(given, allocate(parts, bits), strict=True)) for bits in range(7)
        )
    assert [part.tolist() for part in allocate(parts, 12, [5, 2])] == [[2, 0], [1]]
    assert [part.tolist() for part in allocate(parts, 6, [0, 3])] == [[2, 2], [2]]


def test_a_drop_is_no_larger_than_the_one_before_it() -> None:
    """A bit that helps only behind one that does not counts as little as that one."""
    given = allocate([torch.tensor([[4.0, 3.875, 0.0]]), torch.tensor([[2.0, 1.0, 0.75]])], 2)
    assert [part.tolist() for part in given] == [[0], [2]]
    assert [part.tolist() for part in allocate([torch.tensor([[1.0, 0.5, 0.5]])], 9)] == [[2]]


@pytest.mark.parametrize("text", ["transform", "transform:", "transform:x", "kvtc:2", "transform:nan"])
def test_names_of_no_storage_codec(text: str) -> None:
    with pytest.raises(OptionError, match="bits a number"):
        parse_storage_codec(text)


@pytest.mark.parametrize("bits", ["0.4", "4.1", "-1", "inf"])
def test_bits_out_of_range(bits: str) -> None:
    with pytest.raises(OptionError, match=r"0\.5 to 4 bits a number"):
        parse_storage_codec(f"transform:{bits}")
    assert parse_storage_codec("transform:1.50").name == "transform:1.5"
