"""Group formats on plain tensors: bits, error bounds, axes, what cannot be encoded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.codec.groups import E4M3, Coder, integers
from millpond.errors import NumericsError, OptionError
from millpond.kernels.packed.layout import Side
from tests.helpers.examples import examples


def relative(x: Tensor, side: Side) -> float:
    coder = Coder(side)
    return float((coder.decode(coder.encode(x)) - x).norm() / x.norm())


def keys_with_outliers() -> Tensor:
    """The fixture of the methods' notes: N(0, 1), channel 5 times 10, channel 40 plus 6, as one page per head."""
    x = torch.randn(1, 8, 256, 64, generator=torch.Generator().manual_seed(0))
    x[..., 5] *= 10
    x[..., 40] += 6
    return x[0]


@pytest.mark.parametrize(
    ("bits", "group", "by_channel", "expected"),
    [(2, 32, True, 0.36), (4, 32, True, 0.072), (2, 32, False, 0.56), (4, 32, False, 0.107)],
)
def test_the_key_axis(bits: int, group: int, by_channel: bool, expected: float) -> None:
    found = relative(keys_with_outliers(), integers(bits, group, by_channel=by_channel))
    assert found == pytest.approx(expected, rel=0.06)


def test_a_swapped_axis_is_far_worse() -> None:
    keys = keys_with_outliers()
    right, swapped = relative(keys, integers(2, 64, by_channel=True)), relative(keys, integers(2, 64))
    assert right <= 0.45
    assert swapped >= 0.7


@pytest.mark.parametrize(
    ("side", "bits"),
    [
        (integers(2, 32, by_channel=True), 3.0),
        (integers(2, 64, by_channel=True), 2.5),
        (integers(2, 128, by_channel=True), 2.25),
        (integers(4, 32), 5.0),
        (integers(4, 64), 4.5),
        (integers(8, 0, symmetric=True), 8.125),
        (integers(3, 32, by_channel=True), 4.0),
        (integers(2), 2.25),
    ],
)
def test_true_bits(side: Side, bits: float) -> None:
    assert Coder(side).bits_per_element(slots=128, dim=128) == bits


def test_flexgen_error_on_gaussian_data() -> None:
    x = torch.randn(8, 256, 64, generator=torch.Generator().manual_seed(0))
    assert relative(x, integers(4, 64)) == pytest.approx(0.0896, rel=0.02)


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    group=st.sampled_from([32, 64, 128]),
    by_channel=st.booleans(),
    symmetric=st.booleans(),
    dim=st.sampled_from([32, 64, 96, 128]),
    seed=st.integers(0, 99),
    offset=st.sampled_from([0.0, 3.0, -50.0]),
)
@settings(max_examples=examples(60))
def test_error_is_at_most_half_a_step(
    bits: int, group: int, by_channel: bool, symmetric: bool, dim: int, seed: int, offset: float
) -> None:
    if not by_channel:
        group = 32 if dim % group else group
    x = torch.randn(2, 128, dim, generator=torch.Generator().manual_seed(seed)) + offset
    coder = Coder(integers(bits, group, by_channel=by_channel, symmetric=symmetric))
    parts = coder.encode(x)
    assert parts.scales is not None
    step = parts.scales.float()
    step = step.repeat_interleave(group, 1) if by_channel else step.repeat_interleave(group, 2)
    edge = x.abs().max() * 2**-10  # the range itself is rounded to float16
    error = (coder.decode(parts) - x).abs()
    assert bool((error <= step / 2 * 1.001 + edge).all())


def test_more_bits_and_smaller_groups_err_less() -> None:
    x = keys_with_outliers()
    by_bits = [relative(x, integers(bits, 32, by_channel=True)) for bits in (2, 3, 4, 8)]
    by_group = [relative(x, integers(4, group, by_channel=True)) for group in (32, 64, 128)]
    assert by_bits == sorted(by_bits, reverse=True)
    assert by_group == sorted(by_group)


@pytest.mark.parametrize("side", [integers(4, 32, by_channel=True), integers(2, 32), integers(8), E4M3])
def test_constant_and_zero_groups_are_exact(side: Side) -> None:
    x = torch.zeros(1, 64, 32)
    assert torch.equal(Coder(side).decode(Coder(side).encode(x)), x)
    x += 2.5 if side is not E4M3 else 0.0
    assert torch.equal(Coder(side).decode(Coder(side).encode(x)), x)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_encoding_again_changes_nothing(bits: int) -> None:
    coder = Coder(integers(bits, 32, by_channel=True))
    once = coder.decode(coder.encode(torch.randn(1, 64, 32).mul(4).round() / 4))
    again = coder.decode(coder.encode(once))
    torch.testing.assert_close(again, once, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("side", [integers(4, 32, by_channel=True), E4M3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(side: Side, bad: float) -> None:
    x = torch.zeros(1, 64, 32)
    x[0, 3, 3] = bad
    with pytest.raises(NumericsError, match="NaN or infinite"):
        Coder(side).encode(x)


def test_what_no_scale_can_hold_is_refused() -> None:
    with pytest.raises(NumericsError, match="beyond 65504"):
        Coder(integers(4)).encode(torch.full((1, 64, 32), 1e6))


def test_e4m3_never_clips() -> None:
    x = torch.tensor([1e-3, 0.1, 448.0, 1e4, 3e5, -3e5]).repeat(64, 16)[None]
    read = Coder(E4M3).decode(Coder(E4M3).encode(x))
    assert float(read.abs().max()) == pytest.approx(3e5, rel=1e-6)
    big = x.abs() > 1e4
    torch.testing.assert_close(read[big], x[big], rtol=2**-4, atol=0)


@pytest.mark.parametrize(
    ("side", "slots", "dim", "match"),
    [
        (integers(4, 64, by_channel=True), 32, 64, "must divide the page of 32 slots"),
        (integers(4, 64), 64, 80, "head_dim=80 does not fall into groups of 64"),
        (integers(4), 64, 20, "head_dim=20"),
        (integers(4), 48, 64, "page_slots=48"),
    ],
)
def test_what_does_not_divide_is_refused(side: Side, slots: int, dim: int, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        Coder(side).encode(torch.zeros(1, slots, dim))


def test_no_integers_of_five_bits() -> None:
    with pytest.raises(OptionError, match="bits=5"):
        integers(5)
