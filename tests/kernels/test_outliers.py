"""Codes of tables, calibrated scales and entries beside the codes: native code writes the bytes of the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.errors import NumericsError, OptionError
from millpond.kernels import native, reference
from millpond.kernels.args import EntryRows
from millpond.kernels.native import library
from millpond.kernels.packed import codes
from millpond.kernels.packed.layout import Format, PackedLayout, Side
from millpond.kernels.packed.regions import PackedRegions
from tests.helpers.examples import examples
from tests.helpers.kernels.make import Case
from tests.helpers.kernels.packed_make import PackedCase, rope_for, side

needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
pytestmark = pytest.mark.usefixtures("two_threads")

GROUPED = [format for format in Format if format.grouped]
SLOTS, POSITIONS = 64, 500


@dataclass
class Written:
    """Rows for pages of a layout: some whole pages of three regions."""

    layout: PackedLayout
    dtype: torch.dtype
    levels: int  #: how many different numbers there are, so that some lie equally far out; 0: as many as there are
    rope: str
    seed: int

    def regions(self) -> PackedRegions:
        rotated, interleaved = self.layout.key_dim // 2, self.rope == "interleaved"
        rope = rope_for(self.layout.key_dim, POSITIONS, rotated, interleaved=interleaved, scale=1.2)
        case = PackedCase(
            Case([0] * 3, 1, 3, 1, self.layout.key_dim, self.layout.value_dim),
            [2 * SLOTS] * 3,
            self.layout.key,
            self.layout.value,
            rope=rope if self.rope else None,
        )
        return case.build().packed

    def rows(self) -> tuple[Tensor, ...]:
        """start, count, index, keys, values and positions."""
        g = torch.Generator().manual_seed(self.seed)
        shape = (3, 130)
        keys, values = (torch.randn(*shape, d, generator=g) for d in (self.layout.key_dim, self.layout.value_dim))
        keys[..., 3] = 8 * keys[..., 3] + 4
        values[0, :40] = 0.0
        if self.levels:
            keys, values = (torch.round(x * self.levels) / self.levels for x in (keys, values))
        index = torch.stack([torch.randperm(shape[1], generator=g) for _ in range(3)]).int()
        count, start = torch.tensor([64, 0, 128]).int(), torch.tensor([64, 0, 0]).int()
        positions = torch.randint(0, POSITIONS, shape, generator=g).int()
        return start, count, index, keys.to(self.dtype), values.to(self.dtype), positions


@st.composite
def written(draw: st.DrawFn) -> Written:
    extra, symmetric = st.sampled_from([0, 1, 20, 41]), draw(st.booleans())
    fixed = draw(st.booleans())
    by_channel = fixed or draw(st.booleans())
    dim, value_dim = draw(st.sampled_from([32, 64, 96, 128])), draw(st.sampled_from([16, 48, 64]))
    group = 32 if by_channel and not fixed else 0
    key = side(draw(st.sampled_from(GROUPED)), by_channel, group, symmetric and not fixed)
    value = side(draw(st.sampled_from(list(Format))), False, draw(st.sampled_from([0, 16])), symmetric)
    layout = PackedLayout(
        SLOTS,
        dim,
        value_dim,
        replace(key, fixed=fixed, n_extra=draw(extra)),
        replace(value, n_extra=draw(extra) if value.format.grouped else 0),
    )
    return Written(
        layout,
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        draw(st.sampled_from([0, 1, 4])),
        draw(st.sampled_from(["halves", "interleaved", ""])) if fixed else "",
        draw(st.integers(0, 99)),
    )


def assert_same_bytes(case: Written) -> None:
    start, count, index, keys, values, positions = case.rows()
    found = []
    for impl in (reference, native):
        regions = case.regions()
        impl.write_packed(regions, EntryRows(start, count, index, keys, values, positions, torch.ones(positions.shape)))
        found.append(regions.pages)
    for a, b in zip(found[0].arrays, found[1].arrays, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@needs_native
@given(case=written())
@settings(max_examples=examples(20))
def test_native_writes_the_bytes_of_the_reference(case: Written) -> None:
    assert_same_bytes(case)


@needs_native
@given(case=written())
@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_instruction_set(isa: str, case: Written) -> None:
    assert_same_bytes(case)


@pytest.mark.parametrize("by_channel", [True, False])
def test_the_farthest_numbers_are_left_out_the_first_of_equals(by_channel: bool) -> None:
    x = torch.zeros(1, 32, 16)
    places = torch.tensor([1, 9, 30]), torch.tensor([2, 4, 7])
    x[0][places] = torch.tensor([1.0, -1.0, 1.0])
    kind = Side(Format.NUQ2, by_channel, 32 if by_channel else 0, n_extra=2)
    # alone in its channel, or in its slot, each is equally many deviations out
    assert (~codes.inliers(x, kind, None)).nonzero().tolist() == [[0, 1, 2], [0, 9, 4]]
    x[0][places] = torch.tensor([1.0, -5.0, 3.0])
    fixed = torch.ones(1, 16), torch.zeros(1, 16)
    kind = Side(Format.NUQ2, True, fixed=True, n_extra=2)
    assert (~codes.inliers(x, kind, fixed)).nonzero().tolist() == [[0, 9, 4], [0, 30, 7]]


def test_outliers_do_not_widen_the_range_and_are_read_exactly() -> None:
    x = torch.rand(1, 32, 32)
    x[0, 5, 6] = 1000.0
    kind = side(Format.NUQ4, n_extra=1)
    found = codes.encode(x, kind)
    assert float(found.scales.max()) <= 0.5
    read = codes.decode(found, kind)
    assert float(read[0, 5, 6]) == pytest.approx(1000.0, abs=0.5)
    x[0, 5, 6], read[0, 5, 6] = 0.0, 0.0
    assert float((read - x).abs().max()) < 0.15


@pytest.mark.parametrize("impl", [reference, pytest.param(native, marks=needs_native)])
@pytest.mark.parametrize("bad", [1e6, -1e30, 3e38])
@pytest.mark.parametrize("what", ["keys", "values"])
def test_an_outlier_beyond_float16_is_refused(impl: object, bad: float, what: str) -> None:
    layout = PackedLayout(SLOTS, 32, 32, side(Format.NUQ4, True, fixed=True, n_extra=9), side(Format.NUQ4, n_extra=9))
    case = Written(layout, torch.float32, 0, "halves", 1)
    start, count, index, keys, values, positions = case.rows()
    (keys if what == "keys" else values)[0, int(index[0, 3]), 5] = bad
    with pytest.raises(NumericsError, match=r"beyond 65504|NaN or infinite"):
        impl.write_packed(case.regions(), EntryRows(start, count, index, keys, values, positions))  # type: ignore[attr-defined]


def test_formats_without_groups_keep_no_outliers() -> None:
    with pytest.raises(OptionError, match="FP8 keeps no outliers"):
        PackedLayout(SLOTS, 32, 32, Side(Format.INT8, True, 32), Side(Format.FP8, n_extra=3))
