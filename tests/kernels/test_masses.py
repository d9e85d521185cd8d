"""Slots that stand for several entries: their log mass in every implementation, and merging without loss."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import blockwise, native, ops, reference
from millpond.kernels.args import AttentionShape, EntryRows, PageRegions, WindowSignalArgs
from millpond.kernels.decode_rules import KEEP_ALL, UNBOUNDED, DecodeRule, Evict, Reduce, Signal
from millpond.kernels.native import library
from millpond.kernels.pages import PageArrays
from tests.helpers.examples import examples
from tests.helpers.kernels.args import decode_args, write_args
from tests.helpers.kernels.make import Call, Case, clone_pages
from tests.helpers.kernels.prompts import Prompt, prompts

IMPLS = [reference, *([native] if library.runnable() else [])]
needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
#: float32, float16, bfloat16 against the reference
TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one query in which entry j counts weights[j] times: (out, lse), in float64."""
    e = weights.double() * torch.exp(k.double() @ q.double())
    return e @ v.double() / e.sum(), e.sum().log()


def make_pages(dtype: torch.dtype, dim: int, n: int, masses: bool) -> PageArrays:
    pages = PageArrays(1 << (n - 1).bit_length(), 8, dim, dim, dtype, torch.device("cpu"), masses=masses)
    pages.add_arena()
    return pages


# ------------------------------------------------------------------------------------------- pages


def test_arrays_exist_only_when_asked_for() -> None:
    without, having = (make_pages(torch.float32, 4, 2, masses) for masses in (False, True))
    assert without.log_masses == []
    assert without.bases.shape == having.bases.shape == (5, 1)
    assert without.bases[4].tolist() == [0]
    assert having.bases[4].tolist() == [having.log_masses[0].data_ptr()]
    assert having.nbytes == without.nbytes + 2 * 8 * 4
    having.add_arena(1)
    assert [len(arenas) for arenas in having.arrays] == [2] * 5
    assert having.log_masses[1].shape == (1, 8)
    having.drop_last_arena()
    assert [len(arenas) for arenas in having.arrays] == [1] * 5
    assert having.bases.shape == (5, 1)


@pytest.mark.parametrize("impl", IMPLS)
def test_write_and_read(impl: ModuleType) -> None:
    pages = make_pages(torch.float32, 4, 4, True)
    pages.log_masses[0].fill_(float("nan"))
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    rows = torch.randn(2, 12, 4)
    positions = torch.arange(12, dtype=torch.int32).expand(2, -1)
    log_masses = torch.rand(12, 2).T  # strided
    index = torch.tensor([[11, 0, 5, 3, 2, 1, 7, 8, 9], [4] * 9], dtype=torch.int32)
    start, count = torch.tensor([0, 1]).int(), torch.tensor([9, 1]).int()
    impl.write(*write_args(pages, table, start * 0, count * 0 + 1, index, rows, rows, positions))
    impl.write(*write_args(pages, table, start, count, index, rows, rows, positions, None, log_masses))
    found = impl.read(PageRegions(pages, table, start + count), 10)[4]
    expected = torch.zeros(2, 10)
    expected[0, :9] = log_masses[0][index[0].long()]
    expected[1, 1] = log_masses[1, 4]  # slot 0 was written without one
    assert torch.equal(found, expected)
    pages.copy_pages(np.array([2], dtype=np.int32), np.array([1], dtype=np.int32))
    assert torch.equal(pages.log_masses[0][1], expected[0, :8])


@pytest.mark.parametrize("impl", IMPLS)
def test_pages_without_masses_read_none(impl: ModuleType) -> None:
    call = Case([9]).build()
    assert impl.read(PageRegions(call.pages, call.table, call.lens), 9)[4] is None
    assert ops.read(PageRegions(call.pages, call.table, call.lens), 9).log_masses is None
    empty = PageArrays(1, 8, 4, 4, torch.float32, torch.device("cpu"), masses=True)
    none = torch.zeros(2, 0, dtype=torch.int32)
    assert torch.equal(reference.read(PageRegions(empty, none, torch.zeros(2).int()), 3)[4], torch.zeros(2, 3))


def test_masses_are_never_dropped_silently() -> None:
    call = Case([9]).build()
    index = torch.zeros(1, 1, dtype=torch.int32)
    rows = (call.keys, call.values, call.positions, call.scores)
    with pytest.raises(OptionError, match="masses=True"):
        ops.write(
            PageRegions(call.pages, call.table, index[0]),
            EntryRows(index[0], index[0] + 1, index, *rows, torch.zeros_like(call.scores)),
        )


# ------------------------------------------------------------------------------------------- decode


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_seq, n_kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 4, 8]))
    n = n_seq * n_kv_heads
    shared = draw(st.booleans())
    longest = draw(st.sampled_from([3, 40, 700, 1300]))
    lens = draw(st.lists(st.integers(0, longest), min_size=n, max_size=n))
    if shared:
        lens = [lens[r // n_kv_heads * n_kv_heads] for r in range(n)]
    rule = DecodeRule(
        draw(st.sampled_from(Signal)), draw(st.sampled_from(Reduce)), draw(st.sampled_from(Evict)), 0.9, 2, shared
    )
    return Case(
        lens,
        n_seq,
        n_kv_heads,
        group,
        draw(st.sampled_from([7, 16, 64])),
        draw(st.sampled_from([8, 20, 64])),
        draw(st.sampled_from([8, 64])),
        draw(st.sampled_from(list(TOLERANCE))),
        4,
        [max(1, m + draw(st.sampled_from([0, 2]))) for m in lens] if not shared else [max(1, m) for m in lens],
        [3] * n,
        draw(st.sampled_from([set(), {0}])),
        rule,
        draw(st.sampled_from([0.0, 2.0])),
        draw(st.sampled_from([0, 0, 5, 60])),
        draw(st.booleans()),
        shared,
        masses=True,
        seed=draw(st.integers(0, 999)),
    )


def check_same(a: Call, b: Call, expected: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> None:
    tol = TOLERANCE[a.case.dtype]
    torch.testing.assert_close(found[0], expected[0], rtol=tol, atol=tol)
    torch.testing.assert_close(found[1], expected[1], rtol=tol, atol=tol)
    assert torch.equal(found[2], expected[2])
    assert torch.equal(a.lens, b.lens)
    torch.testing.assert_close(b.contents()[3], a.contents()[3], rtol=10 * tol, atol=tol)
    masses = a.masses()
    assert masses is not None
    assert torch.equal(masses, b.masses())


@needs_native
@given(case=cases())
@settings(max_examples=examples(40))
def test_native_decode_equals_reference(case: Case) -> None:
    a = case.build()
    b = a.clone()
    check_same(a, b, a.run(reference), b.run(native))


@needs_native
@given(case=cases())
@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_instruction_set(isa: str, case: Case) -> None:
    a = case.build()
    b = a.clone()
    check_same(a, b, a.run(reference), b.run(native))


@needs_native
@pytest.mark.parametrize("window", [0, 900])
def test_zero_log_masses_change_no_bit(window: int) -> None:
    rule = DecodeRule(Signal.SUM, evict=Evict.ACC)
    without = Case([1300, 40], 1, 2, 4, caps=[1300, 99], rule=rule, window=window)
    a, b = without.build(), replace(without, masses=True).build()
    assert b.log_masses is not None
    b.log_masses.zero_()
    b.q, b.k_new, b.v_new = a.q, a.k_new, a.v_new
    b.keys, b.values, b.positions, b.scores = a.keys, a.values, a.positions, a.scores
    b._fill(native)
    for x, y in zip([*a.run(native), *a.contents()], [*b.run(native), *b.contents()], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("impl", IMPLS)
def test_by_hand(impl: ModuleType) -> None:
    """Equal logits 0, masses 3 and 1, then the new entry: weights 3/5, 1/5, 1/5. The softcap leaves masses alone."""
    pages = make_pages(torch.float32, 1, 2, True)
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    index = torch.tensor([[0, 1]], dtype=torch.int32)
    values = torch.tensor([[[10.0], [20.0]]])
    masses = torch.tensor([[3.0, 1.0]]).log()
    impl.write(*write_args(pages, table, lens * 0, lens, index, values * 0, values, index, None, masses))
    one, new = torch.ones(1, 1, 1), torch.full((1, 1, 1), 40.0)
    caps, zero, here = lens * 0 + 2, lens * 0, torch.tensor([5], dtype=torch.int32)
    rule = DecodeRule(Signal.LAST, evict=Evict.OLDEST)
    out, lse, evicted = impl.decode(
        decode_args(one, one * 0, new, pages, table, lens, caps, zero, here, rule, scale=1.0, softcap=0.5)
    )
    assert out.item() == pytest.approx((3 * 10 + 20 + 40) / 5)
    assert lse.item() == pytest.approx(math.log(5))
    assert evicted.tolist() == [0]
    _, _, positions, scores, log_masses = impl.read(PageRegions(pages, table, lens), 2)
    assert positions.tolist() == [[5, 1]]
    assert scores[0].tolist() == pytest.approx([0.2, 0.2])
    assert log_masses.tolist() == [[0.0, 0.0]]  # the new entry does not inherit the mass 3 of the slot


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [(reference, torch.float64), (reference, torch.float32), pytest.param(native, torch.float32, marks=needs_native)],
)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_merging_duplicates_is_lossless(impl: ModuleType, dtype: torch.dtype, group: int) -> None:
    """A region in which entry j occurs m[j] times, and one that holds it once with mass m[j]."""
    gen = torch.Generator().manual_seed(3)
    counts = torch.tensor([3, 1, 7, 2, 1, 12, 1, 5])
    n, total, dim = len(counts), int(counts.sum()), 16
    k, v = torch.randn(1, n, dim, generator=gen).to(dtype), torch.randn(1, n, dim, generator=gen).to(dtype)
    q = torch.randn(1, group, dim, generator=gen).to(dtype)
    new = torch.randn(2, 1, 1, dim, generator=gen).to(dtype)
    outs = []
    for merged in (False, True):
        pages = make_pages(dtype, dim, 8, merged)
        rows = torch.arange(n) if merged else torch.arange(n).repeat_interleave(counts)
        table, lens = torch.arange(8, dtype=torch.int32)[None], torch.tensor([len(rows)], dtype=torch.int32)
        index, positions = rows.int()[None], torch.arange(n, dtype=torch.int32)[None]
        log_masses = counts.float().log()[None] if merged else None
        impl.write(*write_args(pages, table, lens * 0, lens, index, k, v, positions, None, log_masses))
        rest = (pages, table, lens, lens * 0 + UNBOUNDED, lens * 0, lens * 0 + 100, KEEP_ALL)
        out, lse, _ = impl.decode(decode_args(q, new[0], new[1], *rest, scale=0.5))
        outs.append((out.double(), lse.double()))
    assert total == 32
    tol = 1e-5 if impl is native else 1e-6  # a log mass is a float32: log 3 is known to 1e-8
    relative = 1e-6 if impl is reference and dtype == torch.float32 else 0  # sums in another order: a few last bits
    for x, y in zip(outs[0], outs[1], strict=True):
        torch.testing.assert_close(y, x, rtol=relative, atol=tol)


def test_reference_is_exact_in_float64() -> None:
    """With the log mass as stored, nothing is lost to more than float64: entries of weight exp(log mass)."""
    gen = torch.Generator().manual_seed(4)
    k, v, q, new = (torch.randn(1, n, 8, generator=gen, dtype=torch.float64) for n in (5, 5, 1, 1))
    log_masses = (torch.rand(1, 5, generator=gen) * 4).float()
    pages = make_pages(torch.float64, 8, 2, True)
    table, lens = torch.tensor([[0]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    index = torch.arange(5, dtype=torch.int32)[None]
    reference.write(*write_args(pages, table, lens * 0, lens, index, k, v, index, None, log_masses))
    rest = (pages, table, lens, lens * 0 + UNBOUNDED, lens * 0, lens * 0 + 9, KEEP_ALL)
    out, lse, _ = reference.decode(decode_args(q, new, new, *rest, scale=1.0))
    weights = torch.cat([log_masses[0].double().exp(), torch.ones(1, dtype=torch.float64)])
    want, norm = plain_attention(q[0, 0], torch.cat([k[0], new[0]]), torch.cat([v[0], new[0]]), weights)
    torch.testing.assert_close(out[0, 0], want, rtol=0, atol=1e-12)
    assert lse.item() == pytest.approx(norm.item(), abs=1e-6)


def test_shared_pages_carry_masses_apart() -> None:
    call = Case([9], masses=True).build()
    twin = clone_pages(call.pages)
    call.pages.log_masses[0].zero_()
    assert twin.log_masses[0].data_ptr() != call.pages.log_masses[0].data_ptr()
    assert (twin.log_masses[0] != 0).any()


# ------------------------------------------------------------------------------------------- prefill

DIMS = (7, 16, 64, 130)
PROMPTS = prompts([torch.float32, torch.float16, torch.bfloat16], DIMS, DIMS, groups=8, masses=True)
WIDE = prompts([torch.float32, torch.float64, torch.bfloat16], masses=True)
HOW = st.sampled_from([None, *Reduce])


@given(prompt=WIDE, colsum=HOW)
@settings(max_examples=examples(40))
def test_blockwise_prefill_equals_reference(prompt: Prompt, colsum: Reduce | None) -> None:
    prompt.check(prompt.run(reference, colsum), prompt.run(blockwise, colsum))


@needs_native
@given(prompt=PROMPTS, colsum=HOW)
@settings(max_examples=examples(60))
def test_native_prefill_equals_reference(prompt: Prompt, colsum: Reduce | None) -> None:
    prompt.check(prompt.run(reference, colsum), prompt.run(native, colsum))


@needs_native
@given(prompt=PROMPTS, colsum=HOW)
@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_prefill_of_every_instruction_set(isa: str, prompt: Prompt, colsum: Reduce | None) -> None:
    prompt.check(prompt.run(reference, colsum), prompt.run(native, colsum))


def duplicates(dtype: torch.dtype, group: int) -> tuple[Prompt, Prompt, Tensor]:
    """A prompt after a past with duplicates, the same with the duplicates merged, and the counts."""
    gen = torch.Generator().manual_seed(5)
    counts = torch.tensor([4, 1, 9, 1, 2, 30, 1, 6, 3])
    n, n_new, heads, dim = len(counts), 70, 2, 16
    k, v = (torch.randn(heads, n + n_new, dim, generator=gen, dtype=torch.float64).to(dtype) for _ in range(2))
    q = torch.randn(heads * group, n_new, dim, generator=gen, dtype=torch.float64).to(dtype)
    rows = torch.cat([torch.arange(n).repeat_interleave(counts), torch.arange(n, n + n_new)])
    position = torch.arange(n + n_new, dtype=torch.int32)
    q_pos, past = position[n:], position[None, :n]
    merged = Prompt(q, k, v, q_pos, past, None, 0.3, 5.0, 0, counts.to(torch.float64).log()[None])
    whole = replace(merged, k=k[:, rows], v=v[:, rows], past_pos=past[:, rows[:-n_new]], past_log_masses=None)
    return whole, merged, counts


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(
    ("impl", "dtype", "tol"),
    [
        (reference, torch.float64, 1e-12),
        (blockwise, torch.float64, 1e-12),
        (reference, torch.float32, 1e-5),
        pytest.param(native, torch.float32, 1e-5, marks=needs_native),
    ],
)
def test_merged_past_is_lossless(impl: ModuleType, dtype: torch.dtype, tol: float, group: int) -> None:
    whole, merged, counts = duplicates(dtype, group)
    want, found = whole.run(impl, Reduce.SUM), merged.run(impl, Reduce.SUM)
    torch.testing.assert_close(found[0], want[0], rtol=0, atol=tol)
    torch.testing.assert_close(found[1], want[1], rtol=0, atol=max(tol, 1e-6))  # lse and sums are float32
    assert want[2] is not None
    assert found[2] is not None
    parts = torch.cat([counts, torch.ones(len(merged.q_pos), dtype=counts.dtype)]).tolist()
    sums = torch.stack([x.sum(1) for x in want[2].split(parts, 1)], 1)  # what the duplicates got together
    torch.testing.assert_close(found[2], sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", list(Reduce))
def test_window_signal_equals_column_sums(how: Reduce) -> None:
    for prompt in (duplicates(torch.float32, 4)[1], duplicates(torch.float64, 1)[1]):
        sums = prompt.run(reference, how)[2]
        assert prompt.past_pos is not None
        assert prompt.past_log_masses is not None
        heads, n_new = prompt.k.shape[0], len(prompt.q_pos)
        position = torch.cat([prompt.past_pos[0], prompt.q_pos]).expand(heads, -1)
        log_masses = torch.nn.functional.pad(prompt.past_log_masses, (0, n_new))
        for bias in (log_masses, log_masses.expand(heads, -1)):
            shape = AttentionShape(prompt.scale, prompt.softcap)
            given = WindowSignalArgs(prompt.q, prompt.k, prompt.q_pos, position, shape, how, bias)
            found = ops.window_signal(given)
            torch.testing.assert_close(found, sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", [reference, blockwise, pytest.param(native, marks=needs_native)])
def test_masses_of_missing_entries_may_hold_anything(impl: ModuleType) -> None:
    prompt = duplicates(torch.float32, 4)[1]
    assert prompt.past_pos is not None
    assert prompt.past_log_masses is not None
    missing = torch.arange(9)[None] % 3 == 1
    prompt.past_pos = prompt.past_pos.masked_fill(missing, -1)
    want = prompt.run(impl, Reduce.MEAN)
    prompt.past_log_masses = prompt.past_log_masses.masked_fill(missing, float("nan"))
    for x, y in zip(want, prompt.run(impl, Reduce.MEAN), strict=True):
        assert x is not None
        assert y is not None
        assert torch.equal(x, y)


@needs_native
def test_masses_per_head_with_strides() -> None:
    prompt = duplicates(torch.float32, 4)[1]
    assert prompt.past_log_masses is not None
    per_head = torch.stack([prompt.past_log_masses[0], prompt.past_log_masses[0].flip(0)])
    prompt.past_log_masses = per_head
    want = prompt.run(reference, Reduce.SUM)
    for masses in (per_head.float(), per_head.T.contiguous().T, torch.cat([per_head, per_head], 1).float()[:, :9]):
        prompt.past_log_masses = masses
        prompt.check(want, prompt.run(native, Reduce.SUM))


@needs_native
@pytest.mark.filterwarnings("ignore")
def test_compiles_with_masses() -> None:
    prompt = duplicates(torch.float32, 4)[1]
    arguments = (prompt.q, prompt.k, prompt.v, prompt.q_pos, prompt.past_pos, prompt.past_log_masses)
    torch.library.opcheck(torch.ops.millpond.prefill.default, (*arguments, None, 0, 0.2, 0.0, 0, 1.0))

    def step(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
        out, _, _ = ops.decode(
            decode_args(
                call.q,
                call.k_new,
                call.v_new,
                call.pages,
                call.table,
                call.lens,
                call.caps,
                call.recent,
                call.q_pos,
                KEEP_ALL,
                scale=0.25,
            )
        )
        dense = ops.read(PageRegions(call.pages, call.table, call.lens), 10)
        return out, dense.keys, dense.log_masses

    a = Case([9, 4], 1, 2, 2, masses=True).build()
    b = a.clone()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for x, y in zip(step(a), compiled(b), strict=True):
        assert x is not None
        assert y is not None
        assert torch.equal(x, y)
