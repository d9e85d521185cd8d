"""A step over own entries and entries that sequences share: `ops.decode_shared` is `decode` over all of them."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.cache.pages.shared_prefix import SharedPrefixRuns, SharedRun
from millpond.errors import OptionError
from millpond.kernels import blockwise, native, ops, reference
from millpond.kernels.args import AttendOutput, PageRegions, SharedDecodeArgs, SharedRegions
from millpond.kernels.decode_rules import DecodeRule, Signal
from millpond.kernels.native import library
from tests.helpers.examples import examples
from tests.helpers.kernels.make import Call, Case

needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
IMPLS = [reference, blockwise, ops, pytest.param(native, marks=needs_native)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def tree(case: Case, runs: list[SharedRun]) -> tuple[Call, SharedPrefixRuns]:
    """A call whose sequences hold the pages of the first member of each run, and the runs."""
    call = case.build()
    heads = case.n_kv_heads
    by_sequence = call.table.view(case.n_seq, heads, -1)
    for members, begin, end in runs:
        for s in members:
            by_sequence[s, :, begin:end] = by_sequence[members[0], :, begin:end]
    return call, SharedPrefixRuns(runs, by_sequence.numpy(), call.pages)


def shared_args(call: Call, runs: SharedPrefixRuns) -> SharedDecodeArgs:
    args = call.args()
    own = PageRegions(call.pages, runs.own_pages, call.lens - runs.shared_lens)
    return SharedDecodeArgs(replace(args, regions=replace(args.regions, plain=own)), runs.shared)


def both(call: Call, runs: SharedPrefixRuns, impl: ModuleType) -> tuple[AttendOutput, AttendOutput]:
    """What decoding over everything gives, and what `decode_shared` gives; the same is stored."""
    whole, apart = call.clone(), call.clone()
    expected = whole.run(reference)
    args = shared_args(apart, SharedPrefixRuns(runs.runs, ids(apart), apart.pages))
    found = impl.decode_shared(args)
    apart.lens = args.step.regions.plain.lens + runs.shared_lens
    for a, b in zip(whole.contents(), apart.contents(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    return AttendOutput(*expected[:2]), found


def ids(call: Call) -> object:
    return call.table.view(call.case.n_seq, call.case.n_kv_heads, -1).numpy()


@st.composite
def trees(draw: st.DrawFn) -> tuple[Call, SharedPrefixRuns]:
    """Sequences that all begin alike, and some of which go on alike."""
    n_seq, heads, group = draw(st.sampled_from([2, 5, 33])), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    slots, dtype = draw(st.sampled_from([8, 64])), draw(st.sampled_from(list(TOLERANCE)))
    first, second = draw(st.integers(1, 9)), draw(st.integers(0, 4))
    some = tuple(s for s in range(n_seq) if s % 2)
    runs = [SharedRun(tuple(range(n_seq)), 0, first)]
    if second and len(some) > 1:
        runs.append(SharedRun(some, first, first + second))
    own = draw(st.lists(st.integers(0, 40), min_size=n_seq, max_size=n_seq))
    begin = [(first + second * (len(runs) > 1 and s in some)) * slots for s in range(n_seq)]
    case = Case(
        [begin[s] + own[s] for s in range(n_seq) for _ in range(heads)],
        n_seq,
        heads,
        group,
        draw(st.sampled_from([1, 16, 40, 128])),
        draw(st.sampled_from([16, 40, 128])),
        slots,
        dtype,
        inactive=draw(st.sets(st.integers(0, n_seq - 1), max_size=1)),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        sinks=draw(st.booleans()),
        masses=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )
    return tree(case, runs)


@needs_native
@given(drawn=trees())
@settings(max_examples=examples(30))
def test_native_equals_decoding_over_everything(drawn: tuple[Call, SharedPrefixRuns]) -> None:
    call, runs = drawn
    expected, found = both(call, runs, native)
    tol = TOLERANCE[call.case.dtype]
    torch.testing.assert_close(found.out, expected.out, rtol=tol, atol=tol)
    torch.testing.assert_close(found.lse, expected.lse, rtol=tol, atol=tol)
    assert found.out.dtype is call.case.dtype


def nested(n_seq: int = 5, dtype: torch.dtype = torch.float32, group: int = 4, shared: int = 160) -> Case:
    own = [64 + 7 * (s % 5) for s in range(n_seq)]
    lens = [shared + (32 if s in (1, 3) else 0) + own[s] for s in range(n_seq) for _ in range(2)]
    return Case(lens, n_seq, 2, group, 64, 64, 32, dtype, inactive={2}, seed=3)


def runs_of(case: Case, shared: int = 160) -> list[SharedRun]:
    pages = shared // 32
    return [SharedRun(tuple(range(case.n_seq)), 0, pages), SharedRun((1, 3), pages, pages + 1)]


@pytest.mark.parametrize("impl", IMPLS)
def test_every_implementation_reads_two_levels(impl: ModuleType) -> None:
    case = nested()
    expected, found = both(*tree(case, runs_of(case)), impl)
    torch.testing.assert_close(found.out, expected.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)
    assert not found.out[2].any()
    assert bool((found.lse[2] == -torch.inf).all())


@needs_native
def test_rows_of_a_member_may_lie_in_two_blocks() -> None:
    """258 query heads of two members: a block of 256 rows ends inside the second. Ranges are two."""
    case = Case([700, 650], 2, 1, 129, slots=32, seed=4)
    call, runs = tree(case, [SharedRun((0, 1), 0, 20)])
    expected, found = (impl.decode_shared(shared_args(call.clone(), runs)) for impl in (reference, native))
    torch.testing.assert_close(found.out, expected.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n_seq", [5, 20])
def test_threads_change_no_bit(dtype: torch.dtype, n_seq: int) -> None:
    case = nested(n_seq, dtype, shared=1600)
    call, runs = tree(case, runs_of(case, 1600))
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 16, 2, 16):
            torch.set_num_threads(n)
            found.append(native.decode_shared(shared_args(call.clone(), runs)))
    finally:
        torch.set_num_threads(threads)
    for out, lse in found[1:]:
        assert torch.equal(out, found[0].out)
        assert torch.equal(lse, found[0].lse)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_shared_is_a_plain_step(impl: ModuleType) -> None:
    call, runs = tree(nested(), [])
    members = torch.empty(0, dtype=torch.int64)
    empty = PageRegions(call.pages, torch.empty(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    for shared in ((), (SharedRegions(members, empty),)):
        args = replace(shared_args(call.clone(), runs), shared=shared)
        out, lse = impl.decode_shared(args)
        expected = call.clone().run(impl)
        torch.testing.assert_close(out, expected.out, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lse, expected.lse, rtol=1e-6, atol=1e-6)


def test_a_step_that_scores_is_refused() -> None:
    call, runs = tree(nested(), [])
    args = call.args(rule=DecodeRule(signal=Signal.SUM))
    with pytest.raises(OptionError, match="KEEP_ALL"):
        SharedDecodeArgs(args, runs.shared)
    with pytest.raises(OptionError, match="window=0"):
        SharedDecodeArgs(call.args(window=8), runs.shared)
