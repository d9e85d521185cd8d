"""A few new tokens of each sequence in one pass: the bits of decoding them one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.kernels import native, ops, reference
from millpond.kernels.args import DecodeRowsArgs
from millpond.kernels.eager.decode import one_by_one
from millpond.kernels.native import library
from tests.helpers.examples import examples
from tests.helpers.kernels.make import Call, Case

needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def tokens(call: Call, there: list[list[bool]], *, by_column: bool) -> DecodeRowsArgs:
    """New tokens in the columns that are marked, one row per sequence, behind what the call holds."""
    case, gen = call.case, torch.Generator().manual_seed(call.case.seed + 1)
    heads, n = case.n_kv_heads, len(there[0])
    shapes = [(heads * case.group, case.key_dim), (heads, case.key_dim), (heads, case.value_dim)]

    def draw(heads: int, dim: int) -> Tensor:
        if by_column:  # as a model makes them: the heads of a token side by side
            return torch.randn(case.n_seq, n, heads, dim, generator=gen).to(case.dtype).transpose(1, 2)
        return torch.randn(case.n_seq, heads, n, dim, generator=gen).to(case.dtype)

    mask = torch.tensor(there)
    q_pos = torch.where(mask, call.q_pos[:, None].abs() + mask.cumsum(1), -1).int()
    return DecodeRowsArgs(*(draw(*shape) for shape in shapes), call.regions, q_pos, call.args().regions.shape)


@st.composite
def passes(draw: st.DrawFn) -> tuple[Case, list[list[bool]], bool]:
    n_seq, heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    # just before and behind where a chunk (512) and a split (1,024) begin
    size = st.sampled_from([0, 1, 7, 30, 300, 507, 511, 512, 513, 1019, 1023, 1024, 1025, 2047])
    lens = [n for n in draw(st.lists(size, min_size=n_seq, max_size=n_seq)) for _ in range(heads)]
    n = draw(st.integers(1, 9))
    case = Case(
        lens,
        n_seq,
        heads,
        group,
        draw(st.sampled_from([8, 40, 64, 80, 128])),
        draw(st.sampled_from([8, 40, 64, 128])),
        draw(st.sampled_from([4, 16, 64])),
        draw(st.sampled_from(list(TOLERANCE))),
        room=n,
        masses=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 5.0])),
        window=draw(st.sampled_from([0, 3, 200, 700])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )
    there = draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=n_seq, max_size=n_seq))
    return case, there, draw(st.booleans())


def stored(call: Call) -> list[Tensor | None]:
    return [*reference.read(call.regions, int(call.lens.max())), call.lens]


@needs_native
@given(drawn=passes(), threads=st.sampled_from([1, 3]))
@settings(max_examples=examples(60))
def test_rows_have_the_bits_of_single_steps(drawn: tuple[Case, list[list[bool]], bool], threads: int) -> None:
    case, there, by_column = drawn
    call = case.build()
    twin = call.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = native.decode_rows(tokens(call, there, by_column=by_column))
    finally:
        torch.set_num_threads(before)
    expected = one_by_one(tokens(twin, there, by_column=by_column), native.decode)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)
    for ours, theirs in zip(stored(call), stored(twin), strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


@needs_native
@given(drawn=passes())
@settings(max_examples=examples(40))
def test_native_equals_reference(drawn: tuple[Case, list[list[bool]], bool]) -> None:
    case, there, by_column = drawn
    call = case.build()
    twin, tol = call.clone(), TOLERANCE[case.dtype]
    found = native.decode_rows(tokens(call, there, by_column=by_column))
    expected = reference.decode_rows(tokens(twin, there, by_column=by_column))
    torch.testing.assert_close(found.out, expected.out, rtol=tol, atol=tol)
    torch.testing.assert_close(found.lse, expected.lse, rtol=tol, atol=tol)
    assert torch.equal(call.lens, twin.lens)


@needs_native
def test_more_partial_results_than_are_held_at_once() -> None:
    call = Case([2100] * 512, 64, 8, 4, 16, 128, 64, torch.bfloat16, room=5, pages_per_arena=512).build()
    twin, there = call.clone(), [[True] * 5 for _ in range(64)]
    found = native.decode_rows(tokens(call, there, by_column=True))
    assert torch.equal(found.out, one_by_one(tokens(twin, there, by_column=True), native.decode).out)


def test_a_row_sees_the_rows_before_it() -> None:
    """A pass of three is that of its first token, then that of the two others."""
    call = Case([9, 6], 1, 2, 2, room=3).build()
    twin = call.clone()
    args = tokens(call, [[True] * 3], by_column=False)
    whole = ops.decode_rows(args)
    parts = []
    for begin, end in pairwise((0, 1, 3)):
        q, k, v = (t[:, :, begin:end] for t in (args.q, args.k_new, args.v_new))
        parts.append(ops.decode_rows(DecodeRowsArgs(q, k, v, twin.regions, args.q_pos[:, begin:end], args.shape)).out)
    torch.testing.assert_close(torch.cat(parts, 2), whole.out)
