"""The Triton kernels over pages against the reference: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import (
    DECODE,
    DEVICE,
    DTYPES,
    SMALL,
    TUNINGS,
    assert_same_pages,
    close,
    fill,
    ints,
    new_pool,
    normal,
    quick,
    random_table,
    seeds,
)

# isort: split
from millpond.errors import OptionError
from millpond.install_command import install_command
from millpond.kernels import decode_rules, gpu, ops, reference
from millpond.kernels.args import PageRegions
from millpond.kernels.decode_rules import KEEP_ALL, UNBOUNDED, DecodeRule, Evict, Reduce, Signal, Spacing
from millpond.kernels.pages import PageArrays
from tests.helpers.examples import examples
from tests.helpers.kernels.args import decode_args, prefill_args, write_args
from tests.helpers.kernels.make import clone_pages
from tests.kernels.test_decode_shared import both, nested, runs_of, tree

rules = st.builds(
    DecodeRule,
    signal=st.sampled_from(Signal),
    reduce=st.sampled_from(Reduce),
    evict=st.sampled_from(Evict),
    decay=st.sampled_from((1.0, 0.75)),
    sinks=st.sampled_from((0, 2, 5)),
    shared=st.booleans(),
    seed=st.sampled_from((0, 1, 12345, 2**40 + 7)),
    spacing=st.sampled_from((Spacing(), Spacing(3, 1, 0), Spacing(2, 0, 4))),
)


@settings(quick, max_examples=examples(35))
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 3),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((1, 2, 4, 7, 16)),
    st.sampled_from(((16, 16), (24, 40), (80, 8), (5, 32))),
    st.sampled_from((4, 16, 64)),
    st.integers(0, 75),
    rules,
    st.sampled_from((0.0, 3.0)),
    st.sampled_from((0, 1, 40)),
    st.booleans(),
    st.sampled_from(TUNINGS),
    seeds,
)
def test_decode(
    dtype: torch.dtype,
    n_seq: int,
    n_kv_heads: int,
    group: int,
    dims: tuple[int, int],
    slots: int,
    longest: int,
    rule: DecodeRule,
    softcap: float,
    window: int,
    has_sink: bool,
    tuning: Any,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    n_regions = n_seq * n_kv_heads
    # one length and one order of positions for the heads of a sequence if they must agree
    owners = n_seq if rule.shared else n_regions
    lens = torch.randint(0, longest + 1, (owners,), generator=g)
    caps = torch.where(torch.rand(owners, generator=g) < 0.7, lens, lens + 3).clamp(min=1)
    positions = torch.stack([torch.randperm(100, generator=g)[: longest + 1] for _ in range(owners)])
    lens, caps, positions = (ints(t.repeat_interleave(n_regions // owners, 0)) for t in (lens, caps, positions))
    protects = torch.rand(n_regions, generator=g) < 0.5  # without it the new entry may be the one that leaves
    recent = ints(torch.randint(1, 60, (n_regions,), generator=g) * protects)
    q_pos = ints(torch.where(torch.rand(n_seq, generator=g) < 0.2, -1, 100 + torch.arange(n_seq)))
    # spread so wide that rounding does not decide who leaves
    scores = torch.stack([torch.randperm(longest + 1, generator=g) for _ in range(n_regions)]) * 0.37
    scores = scores.float().to(DEVICE)

    table, n_arenas = random_table(n_regions, -(-(longest + 1) // slots), g)
    pages = new_pool(dtype, *dims, slots, n_arenas)
    fill(pages, table, lens, positions, scores, g)
    twin, twin_lens = clone_pages(pages), lens.clone()
    q = normal(g, n_seq, n_kv_heads * group, dims[0], dtype=dtype)
    k_new = normal(g, n_seq, n_kv_heads, dims[0], dtype=dtype)
    v_new = normal(g, n_seq, n_kv_heads, dims[1] + 3, dtype=dtype)[..., : dims[1]]  # a view
    sink = normal(g, n_kv_heads * group) if has_sink else None
    options: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "window": window, "sink_logits": sink}

    want = reference.decode(decode_args(q, k_new, v_new, pages, table, lens, caps, recent, q_pos, rule, **options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DECODE, "TUNING", tuning)
        got = gpu.decode(decode_args(q, k_new, v_new, twin, table, twin_lens, caps, recent, q_pos, rule, **options))
    close(got[0], want[0], dtype)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
    assert got[2].tolist() == want[2].tolist()
    assert got[2].dtype == torch.int32
    assert twin_lens.tolist() == lens.tolist()
    assert_same_pages(twin, pages)


@pytest.mark.covering
@pytest.mark.parametrize("evict", [Evict.ACC, Evict.ACC_MEAN, Evict.RANDOM])
@pytest.mark.parametrize(("shared", "whole"), [(False, True), (False, False), (True, True)])
def test_many_steps_keep_the_same_entries(
    evict: Evict, shared: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors would add up: nine steps over pages that fill, with the twin's own accumulators."""
    if not whole:
        monkeypatch.setattr(DECODE, "TUNING", DECODE.TUNING._replace(whole=0))
    g = torch.Generator().manual_seed(3)
    rule = DecodeRule(Signal.SUM, Reduce.MEAN, evict, decay=0.75, sinks=1, shared=shared, seed=9)
    # a window one longer than the first cap: the next query hides one stored entry, which goes first
    options: dict[str, Any] = {"scale": 0.5, "window": 0 if shared else 4}
    table, n_arenas = random_table(4, 2, g)
    pages = new_pool(torch.float32, 16, 16, 4, n_arenas)
    twin = clone_pages(pages)
    lens, twin_lens = ints([0] * 4), ints([0] * 4)
    for step in range(9):
        q, k, v = normal(g, 2, 6, 16), normal(g, 2, 2, 16), normal(g, 2, 2, 16)
        rest = (ints([3, 3, 6, 6]), ints([2] * 4), ints([step, step + 3]), rule)
        want = reference.decode(decode_args(q, k, v, pages, table, lens, *rest, **options))
        got = gpu.decode(decode_args(q, k, v, twin, table, twin_lens, *rest, **options))
        close(got[0], want[0], torch.float32)
        assert got[2].tolist() == want[2].tolist()
    assert lens.tolist() == twin_lens.tolist() == [3, 3, 6, 6]
    assert_same_pages(twin, pages)


@pytest.mark.parametrize("recent", [0, 2000])
@pytest.mark.parametrize("tuning", TUNINGS)
def test_ties_leave_oldest_first(recent: int, tuning: Any) -> None:
    """Equal accumulators, and nothing but protected entries: both times the oldest position goes, from the last slot.

    The region is so long that its splits and its chunks are combined in more than one round.
    """
    g = torch.Generator().manual_seed(1)
    table, n_arenas = random_table(1, 5, g)
    pages = new_pool(torch.float32, 16, 16, 256, n_arenas)
    positions = ints(1100 - torch.arange(1100))[None]
    fill(pages, table, ints([1100]), positions, torch.zeros(1, 1100, device=DEVICE), g)
    twin, lens, twin_lens = clone_pages(pages), ints([1100]), ints([1100])
    q, k = normal(g, 1, 2, 16), normal(g, 1, 1, 16)
    rest = (ints([1100]), ints([recent]), ints([1500]), DecodeRule(evict=Evict.ACC))
    want = reference.decode(decode_args(q, k, k, pages, table, lens, *rest, scale=1.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DECODE, "TUNING", tuning)
        got = gpu.decode(decode_args(q, k, k, twin, table, twin_lens, *rest, scale=1.0))
    assert got[2].tolist() == want[2].tolist() == [1]
    close(got[0], want[0], torch.float32)
    assert_same_pages(twin, pages)


def test_hash_is_exact() -> None:
    """The victim of RANDOM is the lowest of `victims.hash_priority`, over many seeds and large positions."""
    for seed in (0, 1, 2**31 - 1, 2**31, 2**32 - 1, -5):
        g = torch.Generator().manual_seed(7)
        table, n_arenas = random_table(3, 4, g)
        pages = new_pool(torch.float32, 16, 16, 16, n_arenas)
        positions = ints(torch.randint(0, 2**20, (3, 64), generator=g) * 2000 + torch.arange(64))
        fill(pages, table, ints([64] * 3), positions, torch.zeros(3, 64, device=DEVICE), g)
        rule = DecodeRule(evict=Evict.RANDOM, seed=seed)
        q, last = normal(g, 1, 3, 16), 2**31 - 2
        lens = ints([64] * 3)
        rest = ints([64] * 3), ints([0] * 3), ints([last]), rule
        gone = gpu.decode(decode_args(q, q, q, pages, table, lens, *rest, scale=1.0))[2]
        seen = torch.cat([positions, ints([[last]] * 3)], 1)
        value = decode_rules.hash_priority(seed, torch.arange(3, device=DEVICE)[:, None], seen)
        assert gone.tolist() == seen.gather(1, value.argmin(1, keepdim=True))[:, 0].tolist()


def test_nothing_to_do() -> None:
    """No sequence, an empty pool, inactive sequences: no launch fails and nothing is written."""
    none = PageArrays(4, 16, 16, 16, torch.float32, DEVICE)
    rows = torch.zeros(2, 1, 16, device=DEVICE)
    empty = torch.zeros(2, 0, dtype=torch.int32, device=DEVICE)
    zeros = ints([0, 0])
    for n in (0, 2):
        lens, caps, idle = zeros[:n].clone(), zeros[:n] + 1, zeros[:n] - 1
        rest = (none, empty[:n], lens, caps, zeros[:n], idle, KEEP_ALL)
        out, lse, gone = gpu.decode(decode_args(rows[:n], rows[:n], rows[:n], *rest, scale=1.0))
        assert out.abs().sum() == 0
        assert lse.tolist() == [[-float("inf")]] * n
        assert gone.tolist() == [-1] * n
    keys, _, positions, _, _ = gpu.read(PageRegions(none, empty, zeros), 3)
    assert keys.shape == (2, 3, 16)
    assert positions.tolist() == [[-1] * 3] * 2


@quick
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from(((16, 16), (24, 40), (3, 100))),
    st.sampled_from((4, 16, 64)),
    st.integers(0, 70),
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_write_and_read(
    dtype: torch.dtype,
    source: torch.dtype,
    dims: tuple[int, int],
    slots: int,
    width: int,
    has_scores: bool,
    expanded: bool,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    n, n_rows = 3, width + 5
    start = ints(torch.randint(0, 6, (n,), generator=g))
    count = ints(torch.randint(0, width + 1, (n,), generator=g))
    index = ints(torch.randint(0, n_rows, (n, width), generator=g))
    table, n_arenas = random_table(n, (width + 6) // slots + 1, g)
    pages = new_pool(dtype, *dims, slots, n_arenas)
    twin = clone_pages(pages)
    keys = normal(g, n_rows, n, dims[0], dtype=source).transpose(0, 1)
    values = normal(g, n, n_rows, dims[1] + 1, dtype=source)[..., 1:]
    positions = ints(torch.randperm(n_rows, generator=g))[None].expand(n, -1) if expanded else index.repeat(1, 2)
    positions = positions if positions.shape[1] >= n_rows else ints(torch.arange(n_rows)).expand(n, -1)
    scores = normal(g, n, n_rows) if has_scores else None
    for where, implementation in ((pages, reference), (twin, gpu)):
        implementation.write(*write_args(where, table, start, count, index, keys, values, positions, scores))
    assert_same_pages(twin, pages)

    lens = torch.where(count > 0, count, 0)  # the first `start` slots may be unwritten NaN: both sides copy them
    for got, want in zip(
        gpu.read(PageRegions(twin, table, lens), width),
        reference.read(PageRegions(pages, table, lens), width),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "group", "dims", "softcap", "window", "has_sink", "small", "rule"),
    [
        (torch.float32, 1, (16, 16), 0.0, 0, False, True, DecodeRule(Signal.SUM, evict=Evict.ACC, decay=0.75)),
        (torch.float16, 4, (24, 40), 3.0, 0, True, True, DecodeRule(evict=Evict.OLDEST)),
        (torch.bfloat16, 8, (80, 8), 3.0, 40, True, False, DecodeRule(Signal.LAST, Reduce.MAX, Evict.ACC)),
        (torch.float32, 8, (16, 16), 0.0, 40, False, True, KEEP_ALL),
    ],
)
def test_decode_with_masses(
    dtype: torch.dtype,
    group: int,
    dims: tuple[int, int],
    softcap: float,
    window: int,
    has_sink: bool,
    small: bool,
    rule: DecodeRule,
) -> None:
    g = torch.Generator().manual_seed(11)
    lens = ints([50, 0, 37, 5])
    caps = ints([50, 3, 40, 5])
    positions = torch.stack([torch.randperm(100, generator=g)[:50] for _ in range(4)])
    scores = (torch.stack([torch.randperm(50, generator=g) for _ in range(4)]) * 0.37).to(DEVICE)
    table, n_arenas = random_table(4, 4, g)
    pages = new_pool(dtype, *dims, 16, n_arenas, True)
    twin = clone_pages(pages)
    index = torch.arange(50, dtype=torch.int32, device=DEVICE).expand(4, -1)
    rows = (normal(g, 4, 50, dims[0]), normal(g, 4, 50, dims[1]), ints(positions), scores)
    log_masses = (torch.rand(50, 4, generator=g) * 3).to(DEVICE).T  # strided
    for where, implementation in ((pages, reference), (twin, gpu)):
        implementation.write(*write_args(where, table, ints([0] * 4), lens, index, *rows, log_masses))
    assert_same_pages(twin, pages)
    twin_lens = lens.clone()
    q = normal(g, 2, 2 * group, dims[0], dtype=dtype)
    new = (normal(g, 2, 2, dims[0], dtype=dtype), normal(g, 2, 2, dims[1], dtype=dtype))
    rest = (caps, ints([2] * 4), ints([100, 101]), rule)
    options: dict[str, Any] = {
        "scale": 0.3,
        "softcap": softcap,
        "window": window,
        "sink_logits": normal(g, 2 * group) if has_sink else None,
    }
    want = reference.decode(decode_args(q, *new, pages, table, lens, *rest, **options))
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(DECODE, "TUNING", SMALL)
        got = gpu.decode(decode_args(q, *new, twin, table, twin_lens, *rest, **options))
    close(got[0], want[0], dtype)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
    assert got[2].tolist() == want[2].tolist()
    assert_same_pages(twin, pages)
    dense = gpu.read(PageRegions(twin, table, twin_lens), 51)
    for a, b in zip(dense, reference.read(PageRegions(pages, table, lens), 51), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    # rows written without masses have mass 1
    gpu.write(*write_args(twin, table, ints([0] * 4), twin_lens, index, *rows))
    cleared = gpu.read(PageRegions(twin, table, twin_lens.clamp(max=50)), 50)[4]
    assert cleared is not None
    assert (cleared == 0).all()


def test_ops_reach_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")
    assert ops.op_set(torch.bfloat16, DEVICE) is gpu
    q = torch.ones(1, 4, 16, device=DEVICE)
    sums = ops.prefill(prefill_args(q, q, q, ints([0, 1, 2, 3]), scale=1.0, colsum=Reduce.SUM))[2]
    assert sums is not None
    assert sums.sum().item() == pytest.approx(4.0)


def test_other_dtypes_are_refused() -> None:
    q = torch.zeros(1, 4, 16, dtype=torch.float64, device=DEVICE)
    with pytest.raises(OptionError, match=r"not torch\.float64"):
        gpu.prefill(prefill_args(q, q, q, ints([0, 1, 2, 3]), scale=1.0))


def test_missing_triton_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("millpond.kernels.gpu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(OptionError, match=re.escape(install_command("gpu"))):
        importlib.import_module("millpond.kernels.gpu")


def test_unbounded_regions_grow() -> None:
    g = torch.Generator().manual_seed(0)
    table, n_arenas = random_table(2, 1, g)
    pages = new_pool(torch.bfloat16, 16, 16, 4, n_arenas)
    lens, row = ints([0, 0]), normal(g, 1, 2, 16, dtype=torch.bfloat16)
    for step in range(4):
        gone = gpu.decode(
            decode_args(
                row,
                row,
                row,
                pages,
                table,
                lens,
                ints([UNBOUNDED] * 2),
                ints([0, 0]),
                ints([step]),
                DecodeRule(evict=Evict.OLDEST),
                scale=1.0,
            )
        )[2]
        assert gone.tolist() == [-1, -1]
    assert lens.tolist() == [4, 4]
    assert gpu.read(PageRegions(pages, table, lens), 4)[2].tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the calls are made on the CPU")
def test_own_and_shared_entries_are_one_attention() -> None:
    case = nested()
    expected, found = both(*tree(case, runs_of(case)), gpu)
    close(found.out, expected.out, case.dtype)
    close(found.lse, expected.lse, case.dtype)
