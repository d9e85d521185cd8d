"""Attention as sums beside blocks of another engine: C++ and Triton against the reference, and that against a sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond import OptionError
from millpond.kernels import native, ops, reference
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.kernels.block_args import BlockSumsArgs, KeyOrder, Neighbours
from millpond.kernels.decode_rules import Reduce
from millpond.kernels.native import library
from tests.helpers.examples import examples
from tests.helpers.kernels.blocks import block_sums_args, keys_of, places

needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
KINDS = ("plain", "turned", "pairs", "backwards")


def added(args: BlockSumsArgs, implementation: Any) -> torch.Tensor:
    """The sums after one step."""
    sums = args.sums.clone()
    implementation.block_sums(replace(args, sums=sums))
    return sums


@pytest.mark.parametrize("reduce", Reduce)
def test_the_reference_adds_what_each_entry_receives(reduce: Reduce) -> None:
    """Against the column sums of a prompt's last query; blocks of no sequence stay as they are."""
    args = block_sums_args("turned", [1, 40, 0, 64], seed=1, reduce=reduce, decay=0.5)
    found = added(args, reference)
    wanted = args.sums.clone()
    for row, n in enumerate(args.lens.tolist()):
        if not n:
            continue
        k, past = keys_of(args, row), torch.arange(n - 1, dtype=torch.int32)[None]
        at = torch.tensor([n - 1], dtype=torch.int32)
        q = args.q[row][:, None]
        received = reference.prefill(PrefillArgs(q, k, k, at, args.shape, past if n > 1 else None, None, reduce)).colsum
        assert received is not None
        for j in range(n):
            place = int(args.table[row, j // 32]), slice(None), j % 32
            wanted[place] = received[:, j] + (0 if j == n - 1 else args.sums[place] * 0.5)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@needs_native
@settings(max_examples=examples(60), deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    lens=st.lists(st.sampled_from([0, 1, 31, 32, 33, 100, 200]), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 4), (1, 7), (3, 2)]),
    dim=st.sampled_from([2, 32, 40, 80, 128]),
    block=st.sampled_from([16, 32, 64, 24]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    reduce=st.sampled_from(Reduce),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 999),
)
def test_native_equals_the_reference(kind: str, lens: list[int], block: int, **options: Any) -> None:
    if kind in ("pairs", "turned") and block % 16:
        kind = "plain"
    args = block_sums_args(kind, lens, block=block, decay=0.9, **options)
    torch.testing.assert_close(added(args, native), added(args, reference), rtol=1e-4, atol=1e-5)


@needs_native
def test_results_do_not_depend_on_the_batch() -> None:
    args = block_sums_args("turned", [600] * 8, seed=3, heads=(3, 3))
    together = added(args, ops)
    alone = args.sums.clone()
    for row in range(8):
        one = slice(row, row + 1)
        ops.block_sums(replace(args, q=args.q[one], table=args.table[one], lens=args.lens[one], sums=alone))
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("plain", Neighbours.ANY),
        ("turned", Neighbours.TOKENS),
        ("pairs", Neighbours.PAIRS),
        ("backwards", Neighbours.ANY),
    ],
)
def test_the_order_of_keys_is_found(kind: str, found: Neighbours) -> None:
    at = places(kind, 64, 48)
    order = KeyOrder.of(at)
    assert order.neighbours is found
    assert torch.equal(order.at, at)


def test_an_order_that_is_no_sum_is_refused() -> None:
    at = places("plain", 32, 16)
    at[3, 4], at[5, 6] = int(at[5, 6]), int(at[3, 4])
    with pytest.raises(OptionError, match="one number per token"):
        KeyOrder.of(at)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sums": torch.zeros(3, 2, 32)}, "contiguous float32 of shape"),
        ({"q": torch.zeros(2, 5, 64)}, "a multiple of 2 heads"),
        ({"lens": torch.zeros(3, dtype=torch.int32)}, "as many lengths"),
        ({"shape": AttentionShape(1.0, window=4)}, "window=4"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], says: str) -> None:
    args = block_sums_args("plain", [40, 3], seed=0)
    with pytest.raises(OptionError, match=says):
        replace(args, **change)
