"""Sums of attention by units: C++ against torch, and torch against plain loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.kernels.args import AttentionShape
from millpond.kernels.native import library
from millpond.kernels.unit_sums import UnitSumsArgs, add_unit_sums, reference
from tests.helpers.examples import examples

needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")


def args_of(
    n: int, begin: int, unit: int, step: int, heads: tuple[int, int] = (2, 3), dim: int = 8, **more: object
) -> UnitSumsArgs:
    """Queries from `begin` on; what is before and beside them in memory is no number."""
    torch.manual_seed(n + begin)
    dtype, least = more.pop("dtype", torch.float32), more.pop("least", 1)
    (kv_heads, group), first = heads, begin - begin % unit
    room = torch.full((kv_heads * (group + 1), n + 2, dim + 3), torch.nan)
    room[:, 1:-1, 1 : dim + 1] = torch.randn(kv_heads * (group + 1), n, dim)
    whole = room.to(dtype)[:, 1:-1, 1 : dim + 1]  # type: ignore[call-overload]
    q, keys = whole[kv_heads:, begin:], whole[:kv_heads]
    shape = replace(AttentionShape(1 / dim**0.5), **more)  # type: ignore[arg-type]
    lse = torch.randn(n - begin, kv_heads * group).T + 2  # as other kernels may leave it: column by column
    return UnitSumsArgs(q, lse, keys, torch.rand(kv_heads, n - first + 5), unit, step, shape, least)  # type: ignore[arg-type]


def loops(args: UnitSumsArgs) -> torch.Tensor:
    """The sums, query by query and token by token."""
    sums, shape = args.sums.double(), args.shape
    group = len(args.q) // len(args.keys)
    for p in range(args.begin, args.keys.shape[1]):
        if p % args.step != args.step - 1:
            continue
        for t in range(p // args.unit * args.unit, p + 1 - args.least):
            if shape.window and p - t >= shape.window:
                continue
            for head, query in enumerate(args.q[:, p - args.begin].double()):
                logit = query @ args.keys[head // group, t].double() * shape.scale
                if shape.softcap:
                    logit = shape.softcap * torch.tanh(logit / shape.softcap)
                got = (logit - args.lse[head, p - args.begin]).exp().clamp(max=1)
                sums[head // group, t - args.first] += got / group
    return sums


@pytest.mark.parametrize("more", [{}, {"softcap": 1.5}, {"window": 11}, {"least": 9}], ids=str)
@pytest.mark.parametrize(("n", "begin"), [(70, 0), (70, 33), (64, 60), (40, 39)])
def test_the_reference_adds_the_attention_of_queries_in_the_unit(n: int, begin: int, more: dict[str, float]) -> None:
    args = args_of(n, begin, 32, 4, **more)
    wanted = loops(args)
    reference(args)
    torch.testing.assert_close(args.sums.double(), wanted, rtol=1e-5, atol=1e-5)


@needs_native
@settings(max_examples=examples(60), deadline=None)
@given(
    n=st.integers(1, 600),
    share=st.floats(0, 1),
    unit=st.sampled_from([(256, 16), (256, 4), (32, 1), (32, 2), (64, 64), (512, 16)]),
    heads=st.sampled_from([(1, 1), (3, 3), (2, 7), (1, 20)]),
    dim=st.sampled_from([3, 64, 80, 128, 192]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    softcap=st.sampled_from([0.0, 2.0]),
    window=st.sampled_from([0, 1, 20, 300]),
    least=st.sampled_from([1, 8, 32]),
)
def test_native_sums_are_those_of_the_reference(
    n: int,
    share: float,
    unit: tuple[int, int],
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    softcap: float,
    window: int,
    least: int,
) -> None:
    more = {"dtype": dtype, "softcap": softcap, "window": window, "least": least}
    args = args_of(n, int(share * (n - 1)), *unit, heads, dim, **more)
    wanted = args._replace(sums=args.sums.clone())
    reference(wanted)
    add_unit_sums(args)
    torch.testing.assert_close(args.sums, wanted.sums, rtol=1e-5, atol=1e-5)
