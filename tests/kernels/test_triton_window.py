"""Attention of a few queries to every entry, in Triton, from tensors and pages: on the GPU, else in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DEVICE, DTYPES, ints, new_pool, normal, quick, random_table, seeds

# isort: split
from millpond.errors import OptionError
from millpond.kernels import gpu, reference
from millpond.kernels.args import AttentionShape, PageRegions
from millpond.kernels.decode_rules import Reduce
from millpond.kernels.gpu.window import MOST_SPLITS, PROGRAMS, n_splits
from millpond.kernels.window_args import PagedWindowArgs
from tests.helpers.kernels.args import window_args, write_args
from tests.kernels.test_window_signal import lookbacks

#: Products of numbers in half precision are exact in float32, so all dtypes differ by the order of sums alone.
SUMS = {"rtol": 1e-4, "atol": 1e-5}


@quick
@given(drawn=lookbacks(), how=st.sampled_from(Reduce), known=st.booleans())
def test_equals_the_reference(drawn: tuple[tuple[Tensor, ...], dict[str, Any]], how: Reduce, known: bool) -> None:
    (q, k, q_pos, k_pos), options = drawn
    if known:
        lse = torch.randn(q.shape[:2], generator=torch.Generator().manual_seed(3)) + 2
        options = {**options, "sink_logits": None, "lse": lse}
    options = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in options.items()}
    keys = k.transpose(0, 1).to(DEVICE).transpose(0, 1)  # strided
    args = window_args(q.to(DEVICE), keys, q_pos.to(DEVICE), k_pos.to(DEVICE), reduce=how, **options)
    found = gpu.window_signal(args)
    torch.testing.assert_close(found, reference.window_signal(args), **SUMS)
    assert torch.equal(found, gpu.window_signal(args))


def paged(
    dtype: torch.dtype = torch.float32,
    lens: tuple[int, ...] = (40, 0, 75, 9),
    group: int = 2,
    n_queries: int = 8,
    key_dim: int = 16,
    slots: int = 16,
    masses: bool = False,
    has_sink: bool = False,
    how: Reduce = Reduce.MEAN,
    seed: int = 0,
    **shape: Any,
) -> PagedWindowArgs:
    """Queries of regions in several arenas whose free slots are full of NaN; some entries are newer than queries."""
    g = torch.Generator().manual_seed(seed)
    width, n = max(*lens, 1), len(lens)
    table, n_arenas = random_table(n, -(-width // slots), g)
    pages = new_pool(dtype, key_dim, 8, slots, n_arenas, masses)
    positions = ints(torch.stack([torch.randperm(250, generator=g)[:width] // 2 for _ in lens]))
    index = torch.arange(width, dtype=torch.int32, device=DEVICE).expand(n, width)
    rows = normal(g, n, width, key_dim), normal(g, n, width, 8), positions, normal(g, n, width)
    log_masses = torch.rand(n, width, generator=g).to(DEVICE) * 3 if masses else None
    reference.write(*write_args(pages, table, ints([0] * n), ints(lens), index, *rows, log_masses))
    q = normal(g, n, group, n_queries, key_dim, dtype=dtype)
    settings = AttentionShape(0.3, sink_logits=normal(g, n * group) if has_sink else None, **shape)
    q_pos = ints(torch.arange(n_queries) + 70)
    return PagedWindowArgs(q, q_pos, PageRegions(pages, table, ints(lens)), width + seed % 3, settings, how)


#: Of `paged`, so that every part of the kernels has something to do.
ALL_AT_ONCE: dict[str, Any] = {
    "dtype": torch.float32,
    "lens": (40, 0, 75, 9),
    "group": 3,
    "n_queries": 20,
    "key_dim": 24,
    "slots": 16,
    "masses": True,
    "has_sink": True,
    "how": Reduce.MAX,
    "window": 40,
    "softcap": 2.0,
    "seed": 1,
}


@quick
@given(
    dtype=st.sampled_from(DTYPES),
    lens=st.lists(st.sampled_from([0, 1, 16, 33, 75]), min_size=1, max_size=5).map(tuple),
    group=st.sampled_from([1, 3, 7]),
    n_queries=st.sampled_from([1, 8, 20, 64]),
    key_dim=st.sampled_from([16, 24, 80]),
    slots=st.sampled_from([4, 16, 128]),
    masses=st.booleans(),
    has_sink=st.booleans(),
    how=st.sampled_from(Reduce),
    window=st.sampled_from([0, 1, 40]),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=seeds,
)
@example(**ALL_AT_ONCE)
@example(**ALL_AT_ONCE | {"how": Reduce.MEAN, "masses": False, "group": 7, "key_dim": 80, "dtype": torch.bfloat16})
@example(**ALL_AT_ONCE | {"how": Reduce.SUM, "has_sink": False, "slots": 128, "dtype": torch.float16, "window": 0})
@example(**ALL_AT_ONCE | {"n_queries": 64, "group": 1, "slots": 4, "softcap": 0.0, "lens": (1, 200)})
def test_pages_are_read_where_they_are(**options: Any) -> None:
    args = paged(**options)
    found, width = gpu.window_sums(args), args.width
    torch.testing.assert_close(found, reference.window_sums(args), **SUMS)
    entries = args.over(reference.read(args.regions, width))
    torch.testing.assert_close(found, gpu.window_signal(entries), **SUMS)
    lse = torch.rand(entries.q.shape[:2], generator=torch.Generator().manual_seed(3)).to(DEVICE) * 4 + 2
    known = replace(entries, lse=lse)
    torch.testing.assert_close(gpu.window_signal(known), reference.window_signal(known), **SUMS)
    assert torch.equal(found, gpu.window_sums(args))
    assert not found[torch.arange(width, device=DEVICE) >= args.regions.lens[:, None]].any()


def test_a_pool_without_pages() -> None:
    args = paged(lens=(0, 0))
    args.regions.pages.positions.clear()
    assert torch.equal(gpu.window_sums(args), torch.zeros(2, args.width, device=DEVICE))


def test_a_gpu_is_busy_with_few_regions_too() -> None:
    assert n_splits(8, 2, 256) * 8 * 2 >= PROGRAMS
    assert n_splits(1, 1, 10**6) == MOST_SPLITS
    assert n_splits(1, 2, 5) == 8  # no more than there are blocks, in a power of two
    assert n_splits(256, 8, 10**6) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"q_pos": ints(range(7))}, "not .4 regions, group, 7 positions, key_dim 16"),
        ({"shape": AttentionShape(0.3, sink_logits=torch.zeros(2))}, "one for each of 8 query heads"),
    ],
)
def test_what_does_not_belong_together_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        replace(paged(), **changes)


def test_half_queries_and_keys_in_float32() -> None:
    args = paged()
    args = replace(args, q=args.q.bfloat16())
    torch.testing.assert_close(gpu.window_sums(args), reference.window_sums(args), **SUMS)
