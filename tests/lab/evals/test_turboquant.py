"""TurboQuant's codes against what its paper states of them."""

from __future__ import annotations

import pytest
import torch

from millpond.errors import OptionError
from millpond_lab.evals.candidates.turboquant import centroids, decoded, decoded_unbiased, rotation
from millpond_lab.evals.decoding.record import CLAIMED
from millpond_lab.evals.spec import Spec
from tests.helpers.evals.small import TinyTask, examined, tiny_samples

#: Least squared error of a standard normal number in 1 to 4 bits (Max, 1960, table 1).
LEAST = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}


@pytest.mark.parametrize("bits", LEAST)
def test_levels_are_those_of_lloyd_and_max(bits: int) -> None:
    levels = centroids(bits)
    assert len(levels) == 2**bits
    torch.testing.assert_close(levels, -levels.flip(0), atol=1e-6, rtol=0)
    points = torch.randn(2**20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    nearest = (points[:, None] - levels).abs().amin(1) if bits < 3 else _nearest(points, levels)
    assert float(nearest.square().mean()) == pytest.approx(LEAST[bits], rel=0.02)


def _nearest(points: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    places = torch.bucketize(points, (levels[1:] + levels[:-1]) / 2)
    return points - levels[places]


def test_one_and_two_bits_have_known_levels() -> None:
    torch.testing.assert_close(centroids(1)[1:], torch.tensor([0.7979], dtype=torch.float64), atol=2e-3, rtol=0)
    torch.testing.assert_close(centroids(2)[2:], torch.tensor([0.4528, 1.5104]).double(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_vector_loses_the_error_of_its_numbers_whatever_its_direction_and_norm(bits: int) -> None:
    x = torch.zeros(64, 128, dtype=torch.float64)
    x[torch.arange(64), torch.arange(64)] = torch.logspace(-3, 3, 64, dtype=torch.float64)  # the worst directions
    lost = (decoded(x, bits) - x).square().sum(1) / x.square().sum(1)
    assert float(lost.mean()) == pytest.approx(LEAST[bits], rel=0.15)
    assert float(lost.max()) < 2 * LEAST[bits]
    torch.testing.assert_close(rotation(128) @ rotation(128).T, torch.eye(128, dtype=torch.float64))


def test_inner_products_of_the_second_codes_have_no_bias() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4000, 64, generator=generator, dtype=torch.float64)
    y = x + torch.randn(4000, 64, generator=generator, dtype=torch.float64)
    exact = (x * y).sum(1)
    slopes = [
        float(((code(x, 2) * y).sum(1) * exact).sum() / exact.square().sum()) for code in (decoded, decoded_unbiased)
    ]
    assert slopes[0] < 0.93, "the codes of least error shrink"
    assert slopes[1] == pytest.approx(1, abs=0.02)


def test_what_was_read_is_coded_once_and_the_share_is_claimed() -> None:
    task = TinyTask(items=tiny_samples(3))
    exact, coded, coarse = (
        examined(task, method, protocol="agnostic") for method in ("full", "turboquant:bits=8", "turboquant:bits=2")
    )
    assert [r.answer for r in exact] == [r.answer for r in coded]
    assert [r.answer for r in exact] != [r.answer for r in coarse]
    assert {r.kv_bytes for r in coarse} == {r.kv_bytes for r in exact}
    assert {r.extra[CLAIMED] for r in coarse} == {(2 * 16 + 32) / (16 * 16)}  # key and value of 8 numbers each


def test_bits_out_of_range_and_other_formats_are_refused() -> None:
    from millpond_lab.evals.candidates.candidate import find_candidate

    with pytest.raises(OptionError, match="bits"):
        find_candidate(Spec.parse("turboquant:bits=1"))
    with pytest.raises(OptionError, match="a format of its own"):
        find_candidate(Spec.parse("turboquant")).check("", "int4")
