"""Encoding and decoding of a layer: distortion as measured, equal bits in any tile, and golden numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond.codec.transform.coding import decode, encode, project
from millpond.codec.transform.fit import SideTransform, fit_side
from millpond.codec.transform.ordered_sums import TILE, ordered_product
from millpond.codec.transform.page import PageAddress
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader, adapted_headers, header_bytes, plain_headers
from millpond.errors import DataError, NumericsError

D = 24
AT = PageAddress(1, 0)


def tokens(n: int = 1024, seed: int = 0) -> torch.Tensor:
    """Correlated, with a large mean in one channel, as keys with a bias have."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(D, D, generator=torch.Generator().manual_seed(9)) * torch.logspace(0, -2, D)
    mean = torch.zeros(D)
    mean[3] = 150
    return torch.randn(n, D, generator=generator) @ mix.T + mean


def metric() -> torch.Tensor:
    root = torch.randn(D, D, generator=torch.Generator().manual_seed(8))
    return root @ root.T


def side(x: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> SideTransform:
    x = tokens(8192) if x is None else x
    weights = metric() if weights is None else weights
    return fit_side(weights, x.mean(0), x.T.double().cov(), x, 0.1)


def coded(one: SideTransform, header: LayerHeader, x: torch.Tensor) -> torch.Tensor:
    z = project(one, x)
    return decode((one, one), header, encode((one, one), header, (z, z), AT), AT)[0]


def test_z_is_uncorrelated_and_the_transform_is_undone() -> None:
    one, x = side(), tokens(8192)
    z = project(one, x)
    torch.testing.assert_close(z.std(0), torch.ones(D), rtol=0, atol=0.05)
    torch.testing.assert_close(z[:, :8].T.cov(), torch.eye(8), rtol=0, atol=0.05)  # rows are numbers of bfloat16
    torch.testing.assert_close(ordered_product(z, one.columns, one.mean), x, rtol=0, atol=0.1)


@pytest.mark.parametrize("bits", [0.5, 1.5, 3.0, 4.0])
def test_the_error_is_what_the_calibration_says(bits: float) -> None:
    """dx' M dx, on tokens that it has not read, by the metric with its share of the identity."""
    one, x = side(), tokens(4096, seed=1)
    header = plain_headers([(one, one)], bits)[0]
    assert int(header.bits.sum()) == int(bits * 2 * D)
    error = (coded(one, header, x) - x).double()
    weights = metric().double()
    weights += 0.1 * weights.trace() / D * torch.eye(D, dtype=torch.float64)
    found = float((error @ weights * error).sum(1).mean())
    expected = float(one.distortions.gather(1, header.key.bits.long()[:, None]).sum())
    assert found == pytest.approx(expected, rel=0.1)


def test_a_mean_left_in_is_found() -> None:
    """Codes of a channel around 150, which is far beyond all levels, lose hundreds of times as much."""
    one, x = side(), tokens(256, seed=1)
    header = plain_headers([(one, one)], 1.5)[0]
    z = project(replace(one, mean=torch.zeros(D)), x)
    spoiled = decode((one, one), header, encode((one, one), header, (z, z), AT), AT)[0]
    assert float((spoiled - x).square().mean()) > 100 * float((coded(one, header, x) - x).square().mean())


def test_a_header_of_the_text_lowers_the_error_of_a_foreign_one() -> None:
    """Another mean and other scales than the calibration's."""
    one = side()
    x = (tokens(2048, seed=2) - tokens(8192).mean(0)) * torch.linspace(0.2, 3, D) + 5
    z = project(one, x)
    moments = [(z.mean(0), z.std(0))] * 2
    plain, adapted = plain_headers([(one, one)], 1.5)[0], adapted_headers([(one, one)], moments, 1.5)[0]
    errors = [float((coded(one, header, x) - x).square().mean()) for header in (plain, adapted)]
    assert errors[1] < 0.5 * errors[0]
    assert not torch.equal(adapted.key.bits, plain.key.bits)


def test_blocks_of_any_size_give_equal_codes_and_numbers() -> None:
    one, x = side(), tokens(2 * TILE + 32)
    header = plain_headers([(one, one)], 1.5)[0]
    z = project(one, x)
    pages = encode((one, one), header, (z, z), AT)
    for begin in range(0, len(x), 32):
        alone = project(one, x[begin : begin + 32])
        assert torch.equal(alone, z[begin : begin + 32])
        at = AT._replace(first=begin // 32)
        page = encode((one, one), header, (alone, alone), at)
        assert torch.equal(page[0], pages[begin // 32])
        assert torch.equal(decode((one, one), header, page, at)[1], coded(one, header, x)[begin : begin + 32])


def test_the_order_of_sums() -> None:
    """Column by column in float32, no product fused with its sum: 2^24 loses each 1 that comes behind it."""
    x, big = torch.ones(1, 3), 2.0**24
    assert float(ordered_product(x, torch.tensor([[big], [1.0], [1.0]]))) == big
    assert float(ordered_product(x, torch.tensor([[1.0], [1.0], [big]]))) == big + 2
    third = torch.tensor([[1 / 3]])
    rounded = torch.tensor([1 / 3]).square()  # a fused sum would leave what the square lost in rounding
    assert float(ordered_product(third, third, -rounded)) == 0


def test_golden_numbers_of_decoding() -> None:
    """By hand: one dimension with 2 bits, one with none, which adds its mean."""
    levels = tuple(torch.linspace(-1, 1, 1 << bits) for bits in range(1, 8))
    one = SideTransform(
        torch.tensor([10.0, 20.0]), torch.eye(2), torch.tensor([[1.0, 0.5], [0.0, 2.0]]), torch.ones(2, 8), levels
    )
    header = LayerHeader(
        *[SideHeader(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 1.0]), torch.tensor([2, 0]).byte())] * 2
    )
    z = torch.tensor([[-1.0, 9.0], [0.9, 9.0], [1.6, 9.0], [99.0, 9.0]]).repeat(8, 1)
    found = decode((one, one), header, encode((one, one), header, (z, z), AT), AT)[0][:4]
    numbers = 2 * torch.tensor([-1.0, -1 / 3, 1 / 3, 1.0]) + 1
    torch.testing.assert_close(found, torch.stack([10 + numbers, 20 + 3 * 2.0 + numbers / 2], 1))


def test_headers_as_bytes() -> None:
    header = adapted_headers([(side(), side())], [(torch.randn(D), torch.rand(D) + 0.1)] * 2, 1.0)[0].key
    data = header.to_bytes()
    assert len(data) == header_bytes(D) == 4 * D + D // 2
    again = SideHeader.from_bytes(data, D, torch.device("cpu"))
    assert all(torch.equal(getattr(again, name), getattr(header, name)) for name in ("mean", "scale", "bits"))
    for spoiled, rule in ((data[:-1], "has 108 bytes"), (data.clone().fill_(255), "no text gives")):
        with pytest.raises(DataError, match=rule):
            SideHeader.from_bytes(spoiled, D, torch.device("cpu"))


def test_calibrations_of_nothing() -> None:
    with pytest.raises(NumericsError, match="weighs nothing"):
        side(weights=torch.zeros(D, D))
    with pytest.raises(NumericsError, match="all equal"):
        side(torch.ones(64, D))
