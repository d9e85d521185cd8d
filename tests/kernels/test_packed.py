"""Attention over codes: the reference against attention over decoded numbers, native code against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.errors import NumericsError, OptionError
from millpond.kernels import native, ops, reference
from millpond.kernels.args import EntryRows
from millpond.kernels.decode_rules import DecodeRule, Evict, Reduce, Signal
from millpond.kernels.native import library
from millpond.kernels.packed.layout import Format, PackedLayout
from millpond.kernels.packed.regions import PackedRegions
from tests.helpers.examples import examples
from tests.helpers.kernels.args import decode_args
from tests.helpers.kernels.make import Case
from tests.helpers.kernels.packed_make import PackedCall, PackedCase, rope_for, side

needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
pytestmark = pytest.mark.usefixtures("two_threads")

#: Queries are rounded to bfloat16 where the hardware multiplies pairs of it, as over plain bfloat16 pages.
TOLERANCE = 2e-2


@st.composite
def cases(draw: st.DrawFn) -> PackedCase:
    n_seq, n_kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n = n_seq * n_kv_heads
    shared = draw(st.booleans())
    dim, value_dim = draw(st.sampled_from([32, 64, 80, 128])), draw(st.sampled_from([16, 48, 64, 128]))
    by_channel, formats = draw(st.booleans()), st.sampled_from(Format)
    symmetric = draw(st.booleans())
    key = side(draw(formats), by_channel, draw(st.sampled_from([32, 64])) if by_channel else 0, symmetric)
    if not by_channel and dim % 32 == 0 and draw(st.booleans()) and key.format.grouped:
        key = side(key.format, False, 32, symmetric)
    if not by_channel and key.format.grouped and draw(st.booleans()):
        key = replace(key, less_mean=True)
    value = side(draw(formats), False, draw(st.sampled_from([0, 16])), symmetric)
    grain = PackedLayout(64, dim, value_dim, key, value).grain
    longest = draw(st.sampled_from([64, 640, 1700]))
    lens = [m // grain * grain for m in draw(st.lists(st.integers(0, longest), min_size=n, max_size=n))]
    plain = draw(st.lists(st.integers(0, draw(st.sampled_from([3, 40]))), min_size=n, max_size=n))
    dead = draw(st.sampled_from([0, 0, 5]))
    if shared:
        lens = [lens[r // n_kv_heads * n_kv_heads] for r in range(n)]
        plain = [plain[r // n_kv_heads * n_kv_heads] for r in range(n)]
        dead = 0
    live = [p + m - min(m, dead) for p, m in zip(plain, lens, strict=True)]
    slack = draw(st.sampled_from([0, 0, 3]))
    rule = DecodeRule(
        draw(st.sampled_from(Signal)),
        draw(st.sampled_from(Reduce)),
        draw(st.sampled_from([Evict.NEVER, Evict.ACC, Evict.ACC_MEAN, Evict.OLDEST, Evict.RANDOM])),
        draw(st.sampled_from([1.0, 0.9])),
        draw(st.sampled_from([0, 4])),
        False,
        draw(st.integers(0, 99)),
    )
    case = Case(
        plain,
        n_seq,
        n_kv_heads,
        draw(st.integers(1, 7)),
        dim,
        value_dim,
        16,
        torch.float32,
        4,
        [max(1, m + slack) for m in live],
        [draw(st.sampled_from([0, 9]))] * n,
        draw(st.sampled_from([set(), {0}])),
        rule,
        draw(st.sampled_from([0.0, 20.0])),
        draw(st.sampled_from([0, 0, 50])),
        draw(st.booleans()),
        masses=draw(st.booleans()),
        seed=draw(st.integers(0, 500)),
    )
    return PackedCase(case, lens, key, value, 64, dead, balanced=draw(st.booleans()))


def assert_same(a: PackedCall, b: PackedCall, tol: float = TOLERANCE) -> None:
    expected, found = a.run(reference), b.run(native)
    torch.testing.assert_close(found[0], expected[0], rtol=tol, atol=tol)
    torch.testing.assert_close(found[1], expected[1], rtol=tol, atol=tol)
    for left, right in zip(a.packed.pages.codes, b.packed.pages.codes, strict=True):
        assert torch.equal(left, right), "codes of a quantized page changed"
    if a.case.plain.rule.evict in (Evict.ACC, Evict.ACC_MEAN):
        return  # a score that differs by rounding may choose another victim
    assert torch.equal(found[2], expected[2])
    assert torch.equal(a.plain.lens, b.plain.lens)
    assert torch.equal(a.packed.dead, b.packed.dead)
    left, right = a.contents(), b.contents()
    for at in (0, 1, 2, 4, 5, 6):
        assert torch.equal(left[at], right[at])
    alive = left[2] >= 0
    torch.testing.assert_close(right[3][alive], left[3][alive], rtol=10 * tol, atol=tol)
    torch.testing.assert_close(right[7], left[7], rtol=10 * tol, atol=tol)


def assert_read_alike(call: PackedCall, extra: int = 0) -> None:
    """What native code reads of packed pages has the bits of the reference, padding and all."""
    dim, width = call.case.plain.key_dim, max([1, *call.case.lens]) + extra
    found, expected = native.read_packed(call.packed, width, dim), reference.read_packed(call.packed, width, dim)
    for name, a, b in zip(expected._fields, found, expected, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or b is None or torch.equal(a, b), name


@needs_native
@given(case=cases())
@settings(max_examples=examples(60))
def test_native_equals_reference(case: PackedCase) -> None:
    a = case.build()
    assert_same(a, a.clone())


@needs_native
@given(case=cases())
@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_instruction_set(isa: str, case: PackedCase) -> None:
    a = case.build()
    assert_same(a, a.clone(), TOLERANCE if isa in ("v4bf16", "v4fma") else 1e-4)
    assert_read_alike(a)


def one(format: Format, n: int = 192, **more: object) -> PackedCase:
    """One region of packed entries beside 5 plain ones."""
    case = Case([5], 1, 1, 4, 64, 64, 16, seed=3)
    return PackedCase(case, [n], side(format, True, 64), side(format), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", list(Format))
def test_the_reference_attends_to_decoded_numbers(format: Format) -> None:
    call = one(format).build()
    keys, values, positions, _, _ = reference.read_packed(call.packed, 192, 64)
    assert sorted(positions[0].tolist()) == list(range(192))
    plain = call.plain
    k = torch.cat([keys[0], plain.keys[0, :5], plain.k_new[0]])
    v = torch.cat([values[0], plain.values[0, :5], plain.v_new[0]])
    logits = plain.q[0] @ k.T / 8
    out, lse, _ = call.run(reference)
    torch.testing.assert_close(out[0], torch.softmax(logits, -1) @ v, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[0], logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


@needs_native
@pytest.mark.parametrize("format", [Format.INT2, Format.INT4, Format.INT8, Format.NUQ3])
@pytest.mark.parametrize("group", [0, 32])
def test_keys_less_the_mean_of_their_page_lose_nothing_by_large_channels(format: Format, group: int) -> None:
    """Keys with channels at 60 have the error of keys without, and the kernel attends to what is stored."""
    error = {}
    for shift in (0.0, 60.0):
        for less_mean in (False, True):
            case = one(format, 192, shift=shift)
            case.key = replace(side(format, False, group), less_mean=less_mean)
            call = case.build()
            keys = reference.read_packed(call.packed, 192, 64)[0]
            error[shift, less_mean] = float((keys - call.keys).square().mean())
            if less_mean:
                assert_same(call, call.clone())
    assert error[60.0, True] < 1.2 * error[0.0, False]
    assert error[60.0, False] > 20 * error[0.0, False]


@needs_native
def test_the_same_scores_as_over_decoded_numbers() -> None:
    case = one(Format.INT4)
    case.plain.rule = DecodeRule(Signal.SUM)
    a = case.build()
    b = a.clone()
    a.run(reference), b.run(native)
    torch.testing.assert_close(b.contents()[3], a.contents()[3], rtol=1e-2, atol=1e-4)
    assert not torch.equal(b.contents()[3][0], a.scores[0])


@needs_native
def test_an_evicted_packed_entry_becomes_a_tombstone() -> None:
    case = one(Format.INT4)
    case.plain.rule, case.plain.caps = DecodeRule(evict=Evict.OLDEST), [197]
    call = case.build()
    before = [t.clone() for t in call.packed.pages.codes]
    for step in range(3):
        evicted = call.run(native)[2]
        assert evicted.tolist() == [step]
        call.plain.q_pos += 1
    assert call.packed.dead.tolist() == [3]
    assert call.plain.lens.tolist() == [8]
    assert (call.contents()[2] == -1).sum() == 3
    assert all(torch.equal(a, b) for a, b in zip(before, call.packed.pages.codes, strict=True))
    twin = call.clone()
    torch.testing.assert_close(call.run(native)[0], twin.run(reference)[0], rtol=TOLERANCE, atol=TOLERANCE)


@needs_native
@given(case=cases(), extra=st.sampled_from([0, 5]))
@settings(max_examples=examples(60))
def test_native_reads_the_numbers_of_the_reference(case: PackedCase, extra: int) -> None:
    assert_read_alike(case.build(), extra)


@needs_native
@pytest.mark.parametrize("format", [f for f in Format if f.grouped])
def test_native_reads_kept_channels_calibrated_ranges_outliers_and_turned_keys(format: Format) -> None:
    case = one(format, keep=32, balanced=True)
    case.key, case.value = side(format, True, fixed=True, n_extra=40), side(format, n_extra=25)
    call = case.build()
    kept = torch.arange(0, 128, 2, dtype=torch.int32)[: call.layout.value_dim].repeat(len(call.packed.table), 1)
    call.packed = replace(call.packed, value_channels=kept, whole_value_dim=128)
    assert_read_alike(call)
    turned = one(format, rope=rope_for(64, 300, 48, scale=0.9))
    turned.key = case.key
    assert_read_alike(turned.build())


@needs_native
@pytest.mark.parametrize("format", [Format.INT4, Format.NUQ4])
def test_pruned_balanced_keys_with_fixed_scales_and_outliers(format: Format) -> None:
    case = one(format, keep=48, balanced=True)
    case.key = side(format, True, fixed=True, n_extra=30)
    case.value = side(format, n_extra=25)
    assert_same(a := case.build(), a.clone())


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_matter(threads: int) -> None:
    a = one(Format.INT2, 64 * 40).build()
    b = a.clone()
    torch.set_num_threads(threads)
    first = a.run(native)[0]
    torch.set_num_threads(2)
    assert torch.equal(first, b.run(native)[0])


@needs_native
@given(
    format=st.sampled_from(Format),
    dim=st.sampled_from([32, 64, 80, 128]),
    by_channel=st.booleans(),
    symmetric=st.booleans(),
    less_mean=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    counts=st.lists(st.integers(0, 3), min_size=2, max_size=4),
    start=st.integers(0, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(50))
def test_native_packs_the_bytes_of_the_reference(
    format: Format,
    dim: int,
    by_channel: bool,
    symmetric: bool,
    less_mean: bool,
    dtype: torch.dtype,
    counts: list[int],
    start: int,
    seed: int,
) -> None:
    key = side(format, by_channel, 32 if by_channel else 0, symmetric)
    key = replace(key, less_mean=less_mean and format.grouped and not by_channel)
    layout = PackedLayout(64, dim, 32, key, side(format, False, 16, symmetric))
    gen = torch.Generator().manual_seed(seed)
    n, width = len(counts), 250
    keys, values = (torch.randn(n, width, d, generator=gen).to(dtype) for d in (dim, 32))
    index = torch.stack([torch.randperm(width, generator=gen) for _ in range(n)]).int()
    # without groups over slots any run of slots may be written
    grain = layout.grain if layout.grain > 1 else 13
    count, begin = (torch.tensor([c * grain for c in cs], dtype=torch.int32) for cs in (counts, [start] * n))
    positions = torch.randint(0, 999, (n, width), generator=gen).int()
    pages = []
    for impl in (reference, native):
        case = PackedCase(Case([0] * n, 1, n, 1, dim, 32), [320] * n, layout.key, layout.value)
        packed = case.build().packed
        impl.write_packed(packed, EntryRows(begin, count, index, keys, values, positions, torch.ones(n, width)))
        pages.append(packed.pages)
    for a, b in zip(pages[0].arrays, pages[1].arrays, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.covering
@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize("slots", [256, 224])
def test_the_reference_makes_all_it_needs_on_the_device_of_the_pages(format: Format, slots: int) -> None:
    """What it made elsewhere would lie on the default device, where nothing can be read."""
    case = one(format, 256)
    case.key = side(format, True, 0, fixed=True, n_extra=5) if format.uses_table else side(format)
    a, b = case.build(), case.build()
    index, n = torch.arange(256, dtype=torch.int32)[None], torch.tensor([slots], dtype=torch.int32)
    if format is Format.FP8 or format.uses_table:
        n.fill_(256)
    rows = torch.zeros(1, dtype=torch.int32), n, index, a.keys.flip(1), a.values.flip(1), a.positions
    reference.write_packed(a.packed, EntryRows(*rows))
    with torch.device("meta"):
        reference.write_packed(b.packed, EntryRows(*rows))
        found = reference.read_packed(b.packed, 256, 64)
    for x, y in zip(found[:4], reference.read_packed(a.packed, 256, 64)[:4], strict=True):
        assert torch.equal(x, y)


def test_appending_in_chunks_gives_the_same_codes() -> None:
    whole, chunks = (one(Format.INT2, 256).build() for _ in range(2))
    index = torch.arange(256, dtype=torch.int32)[None]
    for arena in chunks.packed.pages.codes:
        arena.zero_()
    for begin, end in ((0, 64), (64, 192), (192, 256)):
        start, count = (torch.tensor([n], dtype=torch.int32) for n in (begin, end - begin))
        given = EntryRows(start, count, index[:, begin:end], whole.keys, whole.values, whole.positions)
        ops.write_packed(chunks.packed, given)
    rows = [int(i) for i in whole.packed.table[0]]
    for arena_a, arena_b in zip(whole.packed.pages.codes, chunks.packed.pages.codes, strict=True):
        assert torch.equal(arena_a[: len(rows)], arena_b[: len(rows)])


@pytest.mark.parametrize("impl", [reference, pytest.param(native, marks=needs_native)])
@pytest.mark.parametrize(("bad", "match"), [(float("nan"), "NaN or infinite"), (1e9, "beyond 65504")])
@pytest.mark.parametrize("less_mean", [False, True])
def test_numbers_that_no_code_holds_are_refused(impl: object, bad: float, match: str, less_mean: bool) -> None:
    case = one(Format.INT4, 64)
    case.key = replace(side(Format.INT4), less_mean=True) if less_mean else case.key
    call = case.build()
    keys = call.keys.clone()
    keys[0, 9, 9] = bad
    zero, n = torch.zeros(1, dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    index = torch.arange(64, dtype=torch.int32)[None]
    with pytest.raises(NumericsError, match=match):
        impl.write_packed(call.packed, EntryRows(zero, n, index, keys, call.values, call.positions))  # type: ignore[attr-defined]


def test_a_run_that_cuts_a_group_is_refused() -> None:
    call = one(Format.INT4, 64).build()
    zero, n = torch.zeros(1, dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    index = torch.zeros(1, 40, dtype=torch.int32)
    with pytest.raises(OptionError, match="runs of 64 slots"):
        ops.write_packed(call.packed, EntryRows(zero, n, index, call.keys, call.values, call.positions))


def test_parts_that_do_not_fit_are_refused() -> None:
    call = one(Format.INT4).build()
    other = PackedCase(Case([5], 1, 1, 4, 32, 64, 16), [64], side(Format.INT4), side(Format.INT4)).build().packed
    plain = call.plain
    args = (
        plain.q,
        plain.k_new,
        plain.v_new,
        plain.pages,
        plain.table,
        plain.lens,
        plain.caps,
        plain.recent,
        plain.q_pos,
        DecodeRule(),
    )
    with pytest.raises(OptionError, match="32 channels for plain ones of 64"):
        ops.decode(decode_args(*args, other, scale=0.1))
    fixed = PackedLayout(64, 64, 64, side(Format.NUQ4, True, fixed=True), side(Format.INT4))
    regions = PackedRegions(
        type(other.pages)(4, fixed, torch.device("cpu")), call.packed.table, call.packed.lens, call.packed.dead
    )
    with pytest.raises(OptionError, match="needs calibrated key_scales"):
        ops.decode(decode_args(*args, regions, scale=0.1))


def test_nbytes_are_those_of_the_layout() -> None:
    pages = one(Format.INT4).build().packed.pages
    n = sum(len(arena) for arena in pages.codes)
    assert pages.nbytes == n * (pages.layout.page_bytes + pages.slots * 8)


@pytest.mark.covering
@needs_native
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("format", [Format.INT2, Format.INT4, Format.INT8, Format.FP8])
@pytest.mark.parametrize("by_channel", [True, False])
def test_native_attends_to_decoded_numbers_for_any_group_of_heads(format: Format, by_channel: bool, group: int) -> None:
    n = 640 if by_channel or format is Format.FP8 else 577  # a chunk and the begin of the next, without its last slots
    plain = Case([5], 1, 1, group, 80 if by_channel else 96, 48, 16, seed=group)
    key = side(format, by_channel, 64 if by_channel else 32)
    call = PackedCase(plain, [n], key, side(format, False, 16)).build()
    keys, values, *_ = reference.read_packed(call.packed, n, plain.key_dim)
    k = torch.cat([keys[0], call.plain.keys[0, :5], call.plain.k_new[0]])
    v = torch.cat([values[0], call.plain.values[0, :5], call.plain.v_new[0]])
    logits = call.plain.q[0] @ k.T * plain.key_dim**-0.5
    out, lse, _ = call.run(native)
    # codes of 8 bits meet weights of 14 bits and more, the others bfloat16
    tolerance = 2e-3 if format is Format.INT8 else TOLERANCE
    torch.testing.assert_close(out[0], torch.softmax(logits, -1) @ v, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse[0], logits.logsumexp(-1), rtol=tolerance, atol=tolerance)


@needs_native
def test_every_code_of_e4m3_is_read_as_its_number() -> None:
    case = PackedCase(Case([1], 1, 1, 1, 32, 32, 16), [64], side(Format.FP8), side(Format.FP8))
    call = case.build()
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = 0  # NaN is never stored
    at = call.layout.value_offsets
    page = call.packed.pages.codes[0][int(call.packed.table[0, 0])]
    page[at.codes : at.scales] = codes.repeat((at.scales - at.codes) // 256)
    page[at.scales : at.scales + 4] = torch.ones(1).view(torch.uint8)
    assert_same(call, call.clone())
