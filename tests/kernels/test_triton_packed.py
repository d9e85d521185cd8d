"""Attention over codes in Triton against the reference, in the interpreter (on a GPU: benchmarks/gpu/gpu_codes.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millpond as mp
from millpond.kernels import reference
from millpond.kernels.decode_rules import DecodeRule, Evict, Reduce, Signal, Spacing
from millpond.kernels.packed.layout import Format, Side
from tests.helpers.hf.families import family, left_padded, run
from tests.helpers.kernels.make import Case
from tests.helpers.kernels.packed_make import PackedCall, PackedCase, rope_for, side

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DECODE, TUNINGS

# isort: split
import triton.language as tl

from millpond.kernels import gpu
from millpond.kernels.gpu.common import INTERPRET
from millpond.kernels.gpu.packed_words import word_shapes, words_serve
from tests.helpers.examples import examples

if not INTERPRET:
    pytest.skip("these run in the interpreter of Triton only", allow_module_level=True)

SLOTS = 32

rules = st.builds(
    DecodeRule,
    signal=st.sampled_from(Signal),
    reduce=st.sampled_from(Reduce),
    evict=st.sampled_from(Evict),
    decay=st.sampled_from((1.0, 0.75)),
    sinks=st.sampled_from((0, 4)),
    shared=st.booleans(),
    seed=st.sampled_from((0, 12345)),
    spacing=st.sampled_from((Spacing(), Spacing(3, 1, 0))),
)


@st.composite
def cases(draw: st.DrawFn) -> PackedCase:
    n_seq, n_kv_heads, rule = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(rules)
    regions = n_seq * n_kv_heads
    dim, value_dim = draw(st.sampled_from([(32, 16), (64, 64), (80, 48)]))
    by_channel, symmetric, fixed = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    key = side(draw(st.sampled_from(Format)), by_channel, 32 if by_channel else 0, symmetric)
    key_extra, value_extra = (draw(st.sampled_from([0, 0, 7, 70])) for _ in "kv")
    if by_channel and fixed and key.format.grouped:
        key = side(key.format, True, fixed=True)
    less_mean = key.format.grouped and not key.per_channel and draw(st.booleans())
    key = replace(side_with(key, key_extra), less_mean=less_mean)
    value = side(draw(st.sampled_from(Format)), False, draw(st.sampled_from([0, 16])), symmetric)
    value = side_with(value, value_extra)
    grain = PackedCase(Case([0], 1, 1, 1, dim, value_dim), [0], key, value, SLOTS).build().layout.grain
    owners = n_seq if rule.shared else regions
    packed = draw(st.lists(st.integers(0, 100), min_size=owners, max_size=owners))
    plain = draw(st.lists(st.integers(0, 20), min_size=owners, max_size=owners))
    lens = [packed[r * owners // regions] // grain * grain for r in range(regions)]
    plain = [plain[r * owners // regions] for r in range(regions)]
    dead = 0 if rule.shared else draw(st.sampled_from([0, 3]))
    slack = draw(st.sampled_from([0, 0, 2]))
    caps = [max(1, p + m - min(m, dead) + slack) for p, m in zip(plain, lens, strict=True)]
    case = Case(
        plain,
        n_seq,
        n_kv_heads,
        draw(st.sampled_from([1, 3, 4])),
        dim,
        value_dim,
        16,
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        4,
        caps,
        [draw(st.sampled_from([0, 9]))] * regions,
        draw(st.sampled_from([set(), {0}])),
        rule,
        draw(st.sampled_from([0.0, 5.0])),
        draw(st.sampled_from([0, 50])),
        draw(st.booleans()),
        same_slots=rule.shared,
        masses=draw(st.booleans()),
        seed=draw(st.integers(0, 500)),
    )
    keep = 16 if dim == 32 and not key.fixed and draw(st.booleans()) else 0
    turned = key.fixed and draw(st.booleans())
    rope = rope_for(dim, 200, draw(st.sampled_from([dim, 16])), interleaved=draw(st.booleans())) if turned else None
    return PackedCase(case, lens, key, value, SLOTS, dead, keep, not turned and draw(st.booleans()), rope)


def side_with(plain: Side, n_extra: int) -> Side:
    """The side with entries beside its codes, where its format takes some."""
    return replace(plain, n_extra=n_extra) if plain.format.grouped else plain


def assert_same(case: PackedCase) -> None:
    a = case.build()
    spread_scores(a)
    b = a.clone()
    expected, found = a.run(reference), b.run(gpu)  # type: ignore[arg-type]
    tolerance = 2e-5 if case.plain.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=2e-5, atol=2e-5)
    assert found[2].tolist() == expected[2].tolist()
    assert b.plain.lens.tolist() == a.plain.lens.tolist()
    assert b.packed.dead.tolist() == a.packed.dead.tolist()
    left, right = a.contents(), b.contents()
    alive = left[2] >= 0
    for at in (0, 1, 2, 4, 5, 6):
        assert torch.equal(left[at], right[at])
    torch.testing.assert_close(right[3][alive], left[3][alive], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(right[7], left[7], rtol=1e-5, atol=1e-5)
    for x, y in zip(a.packed.pages.codes, b.packed.pages.codes, strict=True):
        assert torch.equal(x, y)


def spread_scores(call: PackedCall) -> None:
    """Accumulators so far apart that rounding does not decide who leaves."""
    g = torch.Generator().manual_seed(call.case.plain.seed)
    for arena in (*call.plain.pages.scores, *call.packed.pages.scores):
        arena.copy_(torch.randperm(arena.numel(), generator=g).view(arena.shape) * 0.37 + torch.rand((), generator=g))


@given(case=cases(), tuning=st.sampled_from(TUNINGS))
@settings(max_examples=examples(15), derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_decode(case: PackedCase, tuning: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DECODE, "TUNING", tuning)
        assert_same(case)


def one(format: Format, **more: Any) -> PackedCase:
    """One region of packed entries beside 5 plain ones."""
    grouped = format.grouped
    return PackedCase(
        Case([5], 1, 1, 4, 64, 48, 16, **more),
        [96],
        side(format, grouped, 32 if grouped else 0),
        side(format, False, 16 if grouped else 0),
        SLOTS,
    )


@pytest.mark.parametrize("format", [Format.INT4, Format.NUQ4])
def test_splits_past_a_length_lie_between_others(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain table has room for four splits, one of which is used; the packed part has three."""
    monkeypatch.setattr(DECODE, "TUNING", TUNINGS[1])
    assert_same(one(format, room=100))


@pytest.mark.covering
@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_format(format: Format, dtype: torch.dtype) -> None:
    assert_same(one(format, dtype=dtype))


def test_a_packed_victim_leaves_a_tombstone_and_the_new_entry_is_appended() -> None:
    call = one(Format.INT4, caps=[101], rule=DecodeRule(evict=Evict.OLDEST)).build()
    evicted = call.run(gpu)[2]  # type: ignore[arg-type]
    assert evicted.tolist() == [0]  # the packed positions come first
    assert (int(call.plain.lens[0]), int(call.packed.dead[0])) == (6, 1)
    assert int((call.contents()[2][0] == -1).sum()) == 1


@pytest.mark.parametrize("format", [Format.INT4, Format.NUQ3])
def test_keys_less_the_mean_of_their_page(format: Format) -> None:
    case = one(format)
    case.key, case.shift = replace(side(format, False, 32), less_mean=True), 20.0
    assert_same(case)


@pytest.mark.parametrize(
    ("key", "value", "rows"),
    [
        (side(Format.INT4, False, 32), side(Format.INT4, False, 16, True), 16),
        (side(Format.INT8, False, 0, True), side(Format.INT2, False, 16), 16),
        (side(Format.INT4, True, 32, True), side(Format.FP8), 16),
        (side(Format.INT2, True, 64), side(Format.INT8), 16),
        (side(Format.INT3), side(Format.INT3, False, 16), 16),
        (side(Format.INT4, n_extra=3), side(Format.INT4), 0),
        (side(Format.INT4), side(Format.NUQ4), 0),
        (side(Format.INT4, True, fixed=True), side(Format.INT4), 0),
        (side(Format.INT4), side(Format.ROWS), 0),
    ],
)
def test_groups_of_codes_that_are_read_as_words(key: Side, value: Side, rows: int) -> None:
    """Several groups of channels, pages that are not full, and what is read code by code (0 rows)."""
    case = PackedCase(Case([5], 1, 1, 3, 64, 48, 16, window=90), [128], key, value, 64)
    packed = case.build().packed
    assert words_serve(packed, 3, tl.bfloat16) == (rows > 0)
    if rows:
        assert word_shapes(packed.pages.layout, 3, 256)["ROWS_BLOCK"] == rows
    if case.build().layout.grain == 1:
        case.lens = [101]
    assert_same(case)


@pytest.mark.covering
@pytest.mark.parametrize("format", [Format.INT4, Format.NUQ2, Format.NUQ3, Format.NUQ4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [0, 16, 64])
def test_keys_before_rope_and_entries_beside_the_codes(format: Format, dtype: torch.dtype, rotated: int) -> None:
    """KVQuant: more entries beside the codes than are put in place at once, and channels that no pair names."""
    case = one(format, rule=DecodeRule(evict=Evict.ACC, signal=Signal.SUM), caps=[101], dtype=dtype)
    case.key, case.value = side(format, True, fixed=True, n_extra=100), side(format, n_extra=3)
    case.rope = rope_for(64, 200, rotated, scale=0.8) if rotated else None
    assert_same(case)


@pytest.mark.slow  # minutes in the interpreter; on a GPU benchmarks/gpu/run_all.py
@pytest.mark.parametrize(("method", "options"), [("full", {}), ("h2o", {"budget": 90, "sinks": 2})])
def test_generate_through_triton(method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model over codes: the tokens and the kept sets of the reference."""
    model, prompt, found = family("llama").make(head_dim=16), left_padded([120, 50]), []
    for kernels in ("reference", "gpu"):
        monkeypatch.setenv("MILLPOND_KERNELS", kernels)
        with mp.compress(model, method, codec="rotated4", **options) as cache:
            ids = run(model, prompt, 4, cache=cache).ids
            assert all(layer_cache.table.quantized.lens.any() for layer_cache in cache.layer_caches)
            found.append((ids.tolist(), [cache.positions(0, s) for s in range(2)]))
    assert found[0] == found[1]
