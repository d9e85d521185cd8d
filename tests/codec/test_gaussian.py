"""The table for rotated entries: it is the best one for Gaussian numbers, and better than integers of three bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millpond.codec import codec_named
from millpond.codec.groups import Coder, integers
from millpond.codec.nuq import kmeans
from millpond.codec.presets import GAUSSIAN3, TABLE3


def gaussian(dim: int, seed: int) -> Tensor:
    return torch.randn(512, 32, dim, generator=torch.Generator().manual_seed(seed))


def test_the_table_is_that_of_least_error() -> None:
    numbers, weights = [], []
    for dim in (64, 128):
        x = gaussian(dim, 7)
        half, middle = (x.amax(-1, True) - x.amin(-1, True)) / 2, (x.amax(-1, True) + x.amin(-1, True)) / 2
        numbers.append(((x - middle) / half).flatten())
        weights.append(half.square().expand_as(x).flatten() / dim)
    centres = kmeans(torch.cat(numbers), torch.cat(weights), 8)
    centres = (centres - centres.flip(0)) / 2
    assert torch.allclose(centres.float(), torch.tensor(GAUSSIAN3), atol=0.012)


@pytest.mark.parametrize(("dim", "least"), [(32, 0.05), (64, 0.2), (128, 0.25)])
def test_less_error_than_integers(dim: int, least: float) -> None:
    def error(coder: Coder) -> float:
        x = gaussian(dim, 8)
        return float((coder.decode(coder.encode(x)) - x).square().mean())

    assert error(Coder(TABLE3)) < (1 - least) * error(Coder(integers(3)))


def test_a_pair_with_four_bits_of_keys() -> None:
    pair = codec_named(("rotated4", "rotated3"))
    assert pair.rotated
    assert pair.bits_per_element(64, 64) == 4.25  # half a bit of keys for the mean of a page
    assert codec_named("rotated3").bits_per_element(64, 64) == 3.75
