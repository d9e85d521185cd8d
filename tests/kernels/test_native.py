"""The C++ kernels against the reference, and what must never change their results."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import blockwise, native, ops, reference
from millpond.kernels.args import EntryRows, PageRegions
from millpond.kernels.decode_rules import DecodeRule, Evict, Reduce, Signal, Spacing
from millpond.kernels.native import library, structs
from millpond.kernels.pages import PageArrays
from tests.helpers.examples import examples
from tests.helpers.kernels.args import decode_args, write_args
from tests.helpers.kernels.make import Call, Case, clone_pages

pytestmark = [
    pytest.mark.skipif(not library.runnable(), reason="installed without native kernels"),
    pytest.mark.usefixtures("two_threads"),
]

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DIMS = st.sampled_from([1, 7, 8, 16, 20, 32, 64, 80, 96, 128, 192, 256])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_seq, n_kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n = n_seq * n_kv_heads
    shared = draw(st.booleans())
    longest = draw(st.sampled_from([3, 40, 150, 1500]))
    lens = draw(st.lists(st.integers(0, longest), min_size=n, max_size=n))
    if shared:
        lens = [lens[r // n_kv_heads * n_kv_heads] for r in range(n)]
    slack = draw(st.lists(st.sampled_from([0, 0, 1, 9]), min_size=n, max_size=n))
    caps = [max(1, m + (slack[0] if shared else s)) for m, s in zip(lens, slack, strict=True)]
    rule = DecodeRule(
        draw(st.sampled_from(Signal)),
        draw(st.sampled_from(Reduce)),
        draw(st.sampled_from(Evict)),
        draw(st.sampled_from([1.0, 0.9])),
        draw(st.sampled_from([0, 4])),
        shared,
        draw(st.integers(0, 2**32)),
        Spacing(draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([0, 1])), draw(st.sampled_from([0, 3, 4]))),
    )
    return Case(
        lens,
        n_seq,
        n_kv_heads,
        draw(st.integers(1, 9)),
        draw(DIMS),
        draw(DIMS),
        draw(st.sampled_from([8, 16, 64, 256])),
        draw(st.sampled_from(list(TOLERANCE))),
        draw(st.sampled_from([1, 2, 8])),
        caps,
        [draw(st.sampled_from([0, 3, 30]))] * n,
        draw(st.sampled_from([set(), {0}])),
        rule,
        draw(st.sampled_from([0.0, 2.0, 30.0])),
        draw(st.sampled_from([0, 0, 1, 5, 60])),
        draw(st.booleans()),
        shared,
        seed=draw(st.integers(0, 1000)),
    )


def assert_same(a: Call, b: Call, expected: tuple[Tensor, ...], found: tuple[Tensor, ...], tol: float) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tol, atol=tol)
    torch.testing.assert_close(found[1], expected[1], rtol=tol, atol=tol)
    # values that differ by rounding may choose another victim: allow it only where the reference nearly ties
    torch.testing.assert_close(b.lens, a.lens, rtol=0, atol=0)
    assert torch.equal(found[2], expected[2])
    keys, values, positions, scores = a.contents()
    keys_b, values_b, positions_b, scores_b = b.contents()
    assert torch.equal(keys, keys_b)
    assert torch.equal(values, values_b)
    assert torch.equal(positions, positions_b)
    torch.testing.assert_close(scores_b, scores, rtol=10 * tol, atol=tol)


@given(case=cases())
@settings(max_examples=examples(50))
def test_decode_equals_reference(case: Case) -> None:
    a = case.build()
    b = a.clone()
    assert_same(a, b, a.run(reference), b.run(native), TOLERANCE[case.dtype])


@given(case=cases())
@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_instruction_set(isa: str, case: Case) -> None:
    a = case.build()
    b = a.clone()
    assert_same(a, b, a.run(reference), b.run(native), TOLERANCE[case.dtype])


def test_many_steps_stay_equal() -> None:
    rule = DecodeRule(Signal.SUM, evict=Evict.ACC, sinks=2)
    a = Case([5, 9], 1, 2, 4, 64, 64, 8, caps=[20, 20], recent=[4, 4], rule=rule, room=30).build()
    b = a.clone()
    for step in range(60):
        for call in (a, b):
            call.q_pos = torch.tensor([100 + step], dtype=torch.int32)
        gen = torch.Generator().manual_seed(step)
        a.q = b.q = torch.randn(a.q.shape, generator=gen)
        a.k_new = b.k_new = torch.randn(a.k_new.shape, generator=gen)
        assert_same(a, b, a.run(reference), b.run(native), 1e-5)


# ------------------------------------------------------------------------------------------- what must change nothing

LONG = Case(
    [2500, 0, 1100, 3000],
    2,
    2,
    4,
    64,
    80,
    64,
    torch.bfloat16,
    8,
    caps=[2500, 3, 4000, 3000],
    recent=[3] * 4,
    rule=DecodeRule(Signal.SUM, evict=Evict.ACC, decay=0.9),
    window=4000,
)


def everything(call: Call, results: tuple[Tensor, ...]) -> list[Tensor]:
    return [*results, call.lens, *call.contents()]


def assert_identical(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("n_threads", [2, 3, 7])
@pytest.mark.parametrize("shared", [False, True])
def test_thread_count_changes_no_bit(n_threads: int, shared: bool) -> None:
    case = LONG
    if shared:
        rule = DecodeRule(Signal.SUM, evict=Evict.ACC_MEAN, shared=True)
        case = Case([2500, 2500], 1, 2, 4, 64, 64, 64, caps=[2500] * 2, rule=rule, same_slots=True)
    a = case.build()
    b = a.clone()
    torch.set_num_threads(1)
    one = everything(a, a.run(native))
    torch.set_num_threads(n_threads)
    assert_identical(one, everything(b, b.run(native)))


@pytest.mark.parametrize("slots", [8, 32, 256, 1024])
def test_page_size_changes_no_bit(slots: int) -> None:
    a = LONG.build()
    b = Case(**{**LONG.__dict__, "slots": slots}).build()
    b.keys, b.values, b.positions, b.scores = a.keys, a.values, a.positions, a.scores
    b.q, b.k_new, b.v_new = a.q, a.k_new, a.v_new
    b._fill(native)
    assert_identical(everything(a, a.run(native)), everything(b, b.run(native)))


def test_batch_composition_changes_no_bit() -> None:
    together = LONG.build()
    alone = together.clone()
    out, lse, evicted = together.run(native)
    for name in ("q", "k_new", "v_new", "q_pos"):
        setattr(alone, name, getattr(alone, name)[1:])
    for name in ("table", "lens", "caps", "recent"):
        setattr(alone, name, getattr(alone, name)[2:])
    out_1, lse_1, evicted_1 = alone.run(native)
    assert_identical([out[1:], lse[1:], evicted[2:]], [out_1, lse_1, evicted_1])
    width = int(together.lens[2:].max())
    whole = reference.read(PageRegions(together.pages, together.table[2:], together.lens[2:]), width)[:4]
    assert_identical(list(whole), list(alone.contents()))


@pytest.mark.parametrize("rule", [DecodeRule(), DecodeRule(Signal.SUM, evict=Evict.ACC)])
def test_one_long_region_is_split(rule: DecodeRule) -> None:
    a = Case([9000], group=4, key_dim=64, value_dim=64, slots=256, caps=[9000], rule=rule, pages_per_arena=16).build()
    b, c = a.clone(), a.clone()
    assert_same(a, b, a.run(reference), b.run(native), 1e-5)
    torch.set_num_threads(5)
    assert_identical(everything(b, ()), everything(c, c.run(native)[3:]))


def test_strides_and_other_dtypes() -> None:
    a = Case([70, 20], 1, 2, 2, 32, 32, 16, torch.bfloat16).build()
    b = a.clone()
    qkv = torch.randn(1, 8, 32)
    for call in (a, b):
        call.q, call.k_new, call.v_new = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    expected, found = a.run(reference), b.run(native)
    assert found[0].dtype == torch.float32
    assert_same(a, b, expected, found, 2e-2)
    b.q = b.q.transpose(1, 2).contiguous().transpose(1, 2)  # rows that are not contiguous
    b.lens -= 1
    assert torch.equal(b.run(native)[0], found[0])


def test_nan_is_not_hidden() -> None:
    call = Case([70], key_dim=16, value_dim=16, slots=16).build()
    call.q[0, 0, 3] = float("nan")
    assert call.run(native)[0].isnan().all()


def test_infinite_half_precision_values() -> None:
    call = Case([40], key_dim=16, value_dim=16, slots=8, dtype=torch.float16).build()
    other = call.clone()
    for c in (call, other):
        c.v_new[0, 0, 0] = float("inf")
        c.v_new[0, 0, 1] = 6e-8  # subnormal
    assert torch.equal(call.run(reference)[0].isinf(), other.run(native)[0].isinf())
    assert_identical(list(call.contents()), list(other.contents()))


# ------------------------------------------------------------------------------------------- write and read


@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    source=st.sampled_from(list(TOLERANCE)),
    slots=st.sampled_from([8, 64]),
    n=st.integers(1, 4),
    width=st.integers(0, 700),
    dims=st.tuples(DIMS, DIMS),
    with_scores=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(25))
def test_write_and_read_equal_reference(
    dtype: torch.dtype,
    source: torch.dtype,
    slots: int,
    n: int,
    width: int,
    dims: tuple[int, int],
    with_scores: bool,
    seed: int,
) -> None:
    gen = torch.Generator().manual_seed(seed)
    a = Case([0] * n, n, 1, 1, *dims, slots, dtype, 8).build().pages
    n_table = (width + 5) // slots + 1
    while a.n_arenas * 8 < n * n_table:
        a.add_arena()
    b = clone_pages(a)
    table = torch.randperm(n * n_table, generator=gen).view(n, n_table).int()
    keys = torch.randn(n, width + 3, dims[0], generator=gen).to(source)
    values = torch.randn(width + 3, n, dims[1], generator=gen).to(source).transpose(0, 1)
    positions = torch.arange(width + 3, dtype=torch.int32).expand(n, -1)
    scores = torch.rand(n, width + 3, generator=gen) if with_scores else None
    start = torch.randint(0, 5, (n,), generator=gen).int()
    count = torch.randint(0, width + 1, (n,), generator=gen).int()
    index = torch.randint(0, width + 3, (n, width), generator=gen).int()
    for impl, pages in ((reference, a), (native, b)):
        zero = torch.zeros(n, dtype=torch.int32)
        first = torch.full((n,), 5, dtype=torch.int32)
        impl.write(
            PageRegions(pages, table, zero),
            EntryRows(zero, first.clamp(max=width), index, keys, values, positions, scores),
        )
        impl.write(*write_args(pages, table, start, count, index, keys, values, positions, scores))
    lens = torch.minimum(start + count, torch.tensor(n_table * slots)).int().clamp(max=width)
    lens = torch.where(count > 0, lens, 0).int()
    expected, found = (
        reference.read(PageRegions(a, table, lens), width),
        native.read(PageRegions(b, table, lens), width),
    )
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------- torch and the install


def op_arguments(call: Call) -> tuple[object, ...]:
    pages = call.pages
    pool = [pages.pages_per_arena, pages.slots, pages.key_dim, pages.value_dim, structs.DTYPES[pages.dtype]]
    pool.append(int(pages.masses))
    return (
        call.q,
        call.k_new,
        call.v_new,
        pages.bases,
        call.table,
        call.lens,
        call.caps,
        call.recent,
        call.q_pos,
        call.sink_logits,
        pool,
        [0, 0, 0, 0, 0, 0, 1, 0, 0],
        0,
        0.25,
        0.0,
        1.0,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("masses", [False, True])
def test_opcheck(masses: bool) -> None:
    call = Case([9, 4], 1, 2, 2, masses=masses).build()
    torch.library.opcheck(torch.ops.millpond.decode.default, op_arguments(call))
    pool = op_arguments(call)[10]
    torch.library.opcheck(torch.ops.millpond.read.default, (call.pages.bases, call.table, call.lens, 9, pool))
    index = torch.zeros(2, 3, dtype=torch.int32)
    arguments = (call.pages.bases, call.table, call.lens, call.lens * 0 + 1, index, call.keys, call.values)
    torch.library.opcheck(
        torch.ops.millpond.write.default, (*arguments, call.positions, call.scores, call.log_masses, pool)
    )


@pytest.mark.filterwarnings("ignore")
def test_compiles_without_graph_breaks() -> None:
    rule = DecodeRule(Signal.SUM, evict=Evict.ACC)
    a = Case([9, 4], 1, 2, 2, caps=[9, 9], rule=rule).build()
    b = a.clone()

    def step(call: Call) -> tuple[Tensor, Tensor, Tensor]:
        q = call.q * 1.5
        out, lse, evicted = ops.decode(
            decode_args(
                q,
                call.k_new,
                call.v_new,
                call.pages,
                call.table,
                call.lens,
                call.caps,
                call.recent,
                call.q_pos,
                rule,
                scale=0.25,
            )
        )
        return out + 1, lse, evicted

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_identical(everything(a, step(a)), everything(b, compiled(b)))


@pytest.mark.skipif("v4bf16" not in library.runnable(), reason="this CPU multiplies no pairs of bf16")
def test_intels_cores_multiply_floats() -> None:
    vendor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("vendor_id"))
    assert library.runnable()[0] == ("v4fma" if "GenuineIntel" in vendor else "v4bf16")


def test_a_failed_choice_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    library.load.cache_clear()
    monkeypatch.setenv("MILLPOND_ISA", "v5")
    with pytest.raises(OptionError, match="this install can run"):
        library.load()
    monkeypatch.undo()
    library.load.cache_clear()


def test_without_libraries_one_warning_and_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget() -> None:
        library.load.cache_clear(), native._found.cache_clear()

    for name in [name for name in os.environ if name.startswith("MILLPOND")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(library, "_folders", lambda: [])
    forget()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                assert ops.op_set(torch.float32, torch.device("cpu")) is blockwise
        assert [w.category for w in caught] == [native.NativeKernelsWarning], caught
        assert native.isa() == "none"
    finally:
        forget()


def test_float64_pages_go_to_the_reference() -> None:
    chosen = ops.op_set(torch.float64, torch.device("cpu"))
    assert chosen is blockwise
    assert chosen.decode is reference.decode


def test_wrong_index_dtype_is_refused() -> None:
    call = Case([9]).build()
    call.table = call.table.long()
    with pytest.raises(OptionError, match="int32"):
        call.run(native)


def test_helper_pool_matches_contract() -> None:
    pages = Case([9], pages_per_arena=2).build().pages
    assert isinstance(pages, PageArrays)
    assert pages.bases.shape == (5, pages.n_arenas)


def test_libraries_of_other_sources_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    with pytest.raises(library.StaleKernelsError, match=rf"interface {library.ABI - 1} and these sources need"):
        library.load.__wrapped__()
