"""Encoding of entries in Triton against the reference, byte for byte, in the interpreter."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.errors import NumericsError, OptionError
from millpond.kernels import ops, reference
from millpond.kernels.args import EntryRows
from millpond.kernels.packed.layout import Format, PackedLayout, Side
from tests.helpers.kernels.make import Case
from tests.helpers.kernels.packed_make import PackedCase, rope_for, side

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DTYPES

# isort: split
from millpond.kernels import gpu
from millpond.kernels.gpu.common import INTERPRET
from tests.helpers.examples import examples

if not INTERPRET:
    pytest.skip("these run in the interpreter of Triton only", allow_module_level=True)

ENCODE: Any = importlib.import_module("millpond.kernels.gpu.write_packed")  # the package shows the function instead
WIDTH, POSITIONS = 140, 400


@dataclass
class Written:
    """Rows that are written to regions of one head each, `begin` and `counts` in runs of the layout."""

    key: Side
    value: Side
    dim: int = 64
    value_dim: int = 48
    slots: int = 64
    counts: tuple[int, ...] = (2, 0, 1)
    begin: int = 0
    dtype: torch.dtype = torch.float32
    levels: int = 0  #: numbers are multiples of 1 / levels, so that many are equal, or half way between two codes
    keep: int = 0
    balanced: bool = False
    rotated: int = 0
    masses: bool = False
    scored: bool = True
    on_host: bool = False
    seed: int = 0

    def regions(self) -> PackedCase:
        n, rope = len(self.counts), rope_for(self.dim, POSITIONS, self.rotated, scale=0.8) if self.rotated else None
        plain = Case([0] * n, 1, n, 1, self.dim, self.value_dim, masses=self.masses, seed=self.seed)
        held = [320] * n
        return PackedCase(plain, held, self.key, self.value, self.slots, 0, self.keep, self.balanced, rope)

    def rows(self, grain: int) -> EntryRows:
        """Rows of wider tensors, as a slice of each."""
        g, n = torch.Generator().manual_seed(self.seed), len(self.counts)
        run = grain if grain > 1 else 13
        keys, values = (torch.randn(n, WIDTH + 9, d, generator=g)[:, 5:-4] for d in (self.dim, self.value_dim))
        if self.levels:
            keys, values = (torch.round(x * self.levels) / self.levels for x in (keys, values))
        most = max(1, run * max(self.counts))
        index = torch.stack([torch.randint(0, WIDTH, (most,), generator=g) for _ in range(n)]).int()
        count = np.array([run * c for c in self.counts], dtype=np.int32)
        start = np.array([run * (self.begin + r % 2) for r in range(n)], dtype=np.int32)
        positions = torch.randint(0, POSITIONS, (1, WIDTH), generator=g).int().expand(n, -1)
        scores, masses = torch.rand(2, n, WIDTH, generator=g)
        return EntryRows(
            torch.from_numpy(start),
            torch.from_numpy(count),
            index,
            keys.to(self.dtype),
            values.to(self.dtype),
            positions,
            scores if self.scored else None,
            masses if self.masses and self.scored else None,
            (start, count) if self.on_host else None,
        )


def assert_same_bytes(case: Written) -> None:
    call = case.regions().build()
    other, rows = call.clone(), case.rows(call.layout.grain)
    reference.write_packed(call.packed, rows)
    gpu.write_packed(other.packed, rows)
    assert len(call.packed.pages.codes) > 1, "several arenas"
    for a, b in zip(call.packed.pages.arrays, other.packed.pages.arrays, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


@st.composite
def written(draw: st.DrawFn) -> Written:
    dim, value_dim = draw(st.sampled_from([32, 64, 80, 96, 128])), draw(st.sampled_from([16, 48, 64]))
    slots, symmetric = draw(st.sampled_from([32, 64])), draw(st.booleans())
    formats = st.sampled_from(Format)
    shape = draw(st.sampled_from(["channel", "slot", "mean", "fixed"]))
    by_channel = shape in ("channel", "fixed")
    group = draw(st.sampled_from([32, slots])) if shape == "channel" else 0
    if shape in ("slot", "mean") and dim % 32 == 0:
        group = draw(st.sampled_from([0, 32]))
    key = side(draw(formats), by_channel, group, symmetric and shape != "fixed")
    if key.format.grouped:
        key = replace(key, less_mean=shape == "mean", fixed=shape == "fixed")
    value = side(draw(formats), False, draw(st.sampled_from([0, 16])), symmetric)
    turned = key.per_channel and draw(st.booleans())
    fewer = dim == 32 and (key.per_channel or not key.group) and not key.fixed and not turned  # channels of a key
    return Written(
        key,
        value,
        dim,
        value_dim,
        slots,
        draw(st.sampled_from([(2, 0, 1), (1, 1), (0, 2, 2)])),
        draw(st.sampled_from([0, 1])),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([0, 1, 4])),
        16 if fewer and draw(st.booleans()) else 0,
        not turned and draw(st.booleans()),
        draw(st.sampled_from([dim, 16])) if turned else 0,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 500)),
    )


@given(case=written())
@settings(max_examples=examples(25), derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_it_writes_the_bytes_of_the_reference(case: Written) -> None:
    assert_same_bytes(case)


@pytest.mark.covering
@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize("by_channel", [True, False])
def test_every_format(format: Format, by_channel: bool) -> None:
    key = side(format, by_channel, 32 if by_channel else 0, symmetric=not by_channel)
    assert_same_bytes(Written(key, side(format, False, 16, symmetric=by_channel), levels=2, on_host=True))


@pytest.mark.parametrize("format", [Format.INT4, Format.NUQ3])
def test_keys_less_the_mean_of_their_page(format: Format) -> None:
    key = replace(side(format), less_mean=True)
    assert_same_bytes(Written(key, side(format), dtype=torch.bfloat16, dim=96, balanced=True))


@pytest.mark.parametrize("format", [Format.INT2, Format.INT3, Format.INT4, Format.INT8])
@pytest.mark.parametrize("on_host", [True, False])
def test_runs_that_begin_and_end_inside_a_word(format: Format, on_host: bool) -> None:
    """Codes of other slots in the same words stay; 39 slots from slot 26 on are in three groups of 32."""
    case = Written(side(format), side(format, False, 16), begin=2, counts=(3, 1, 0, 2), on_host=on_host)
    assert_same_bytes(case)


def test_numbers_half_way_between_two_bfloat16() -> None:
    assert_same_bytes(Written(side(Format.ROWS), side(Format.ROWS), levels=256))


def test_groups_that_are_no_power_of_two() -> None:
    assert_same_bytes(Written(side(Format.INT4), side(Format.INT4, False, 48), dim=96, value_dim=96))
    assert_same_bytes(Written(side(Format.INT3, False, 32), side(Format.INT2, False, 80), dim=160, value_dim=160))


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_e4m3_of_small_and_of_large_numbers(scale: float) -> None:
    """Every exponent of the format, its subnormal numbers among them, and numbers half way between two."""
    case = Written(side(Format.FP8), side(Format.FP8), slots=32, counts=(1, 1), dtype=torch.float32)
    call = case.regions().build()
    other, rows = call.clone(), case.rows(32)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([448.0])])
    keys = halves[torch.randint(0, len(halves), rows.keys.shape)] * rows.keys.sign()
    keys[:, :, 0] = 448.0
    rows = replace(rows, keys=keys * scale if scale < 1 else keys)
    reference.write_packed(call.packed, rows)
    gpu.write_packed(other.packed, rows)
    assert all(torch.equal(x, y) for x, y in zip(call.packed.pages.codes, other.packed.pages.codes, strict=True))


REFUSED = {
    "by channel": side(Format.INT4, True, 32),
    "by slot": side(Format.INT4),
    "symmetric": side(Format.INT8, False, 32, True),
    "less the mean": replace(side(Format.INT4), less_mean=True),
    "e4m3": side(Format.FP8),
    "calibrated": side(Format.NUQ4, True, fixed=True),
    "table": side(Format.NUQ2),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy tells of what is infinite
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e9, -1e9])
@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_no_code_holds_are_refused(name: str, bad: float) -> None:
    """As the reference does: formats whose scales are float32 hold 1e9."""
    found = []
    for number in (bad, 1.0):
        call = Written(REFUSED[name], side(Format.INT4)).regions().build()
        rows = Written(REFUSED[name], side(Format.INT4)).rows(call.layout.grain)
        rows.keys[2, int(rows.index[2, 9]), 9] = number
        messages = []
        for impl in (reference, gpu):
            try:
                impl.write_packed(call.packed, rows)
            except NumericsError as error:
                messages.append(str(error))
        found.append(messages)
    assert not found[1]
    assert len(found[0]) in (0, 2)
    assert len(set(found[0])) <= 1
    if not np.isfinite(bad):
        assert "NaN or infinite" in found[0][1]
    elif name not in ("e4m3", "calibrated"):
        assert "beyond 65504" in found[0][1]


def test_values_that_no_code_holds_are_refused() -> None:
    case = Written(side(Format.ROWS), side(Format.INT4))
    call = case.regions().build()
    rows = case.rows(call.layout.grain)
    rows.values[0, int(rows.index[0, 3]), 5] = float("nan")
    with pytest.raises(NumericsError, match="NaN or infinite"):
        gpu.write_packed(call.packed, rows)


def test_pages_with_outliers_are_encoded_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(ENCODE, "_encode", lambda *args: launched.append(args))
    assert_same_bytes(Written(side(Format.NUQ4, True, fixed=True, n_extra=9), side(Format.INT4, n_extra=3)))
    layouts = [PackedLayout(64, 64, 64, side(Format.INT4, n_extra=n), side(Format.INT4, n_extra=m)) for n, m in EXTRA]
    assert [ENCODE.kernel_serves(layout) for layout in layouts] == [True, False, False]
    assert not launched


EXTRA = ((0, 0), (1, 0), (0, 1))


@pytest.mark.parametrize(("start", "count"), [(0, 40), (32, 64)])
def test_counts_of_the_host_that_cut_a_group_are_refused(start: int, count: int) -> None:
    case = Written(side(Format.INT4, True, 64), side(Format.INT4), on_host=True)
    call = case.regions().build()
    rows = case.rows(64)
    given_runs = np.full(3, start, dtype=np.int32), np.full(3, count, dtype=np.int32)
    with pytest.raises(OptionError, match="runs of 64 slots"):
        ops.write_packed(call.packed, replace(rows, on_host=given_runs))
