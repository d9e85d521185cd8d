"""Selection of entries and their move to pages: every op set against a plain sort, entry by entry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millpond.kernels import blockwise, native
from millpond.kernels.args import EntryRows, PageRegions
from millpond.kernels.pages import PageArrays
from millpond.kernels.selection_args import BestArgs, MoveArgs, ShareArgs

SETS = ["blockwise", "native", "gpu"]


def op_set(name: str):  # type: ignore[no-untyped-def]
    if name == "blockwise":
        return blockwise
    if name == "native":
        return native if native.is_available() else pytest.skip("this install has no native kernels")
    pytest.importorskip("triton", reason="Triton is not installed (pip install 'millpond[gpu]')")
    from millpond.kernels import gpu
    from millpond.kernels.gpu.common import INTERPRET

    if not INTERPRET:
        pytest.skip("on the CPU its kernels run in the interpreter of Triton")
    return gpu


def values(shape: tuple[int, ...], kind: str) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    if kind == "equal":
        return made.sign() * 0.5
    if kind == "zeros":  # of both signs, which are equal
        return torch.where(made > 0.5, made, 0.0 * made)
    return made if kind == "any" else made.masked_fill(made > 1, torch.inf).masked_fill(made < -1, -torch.inf)


def pinned_in(spans: Tensor, row: int, n: int) -> list[bool]:
    return [any(begin <= column < end for begin, end in spans[row].tolist()) for column in range(n)]


def ranked(value: Tensor, spans: Tensor, row: int) -> list[int]:
    """Columns of a row, those that stay longest first."""
    numbers, pinned = value.tolist(), pinned_in(spans, row, len(value))
    return sorted(
        range(len(numbers)), key=lambda at: (pinned[at], 0.0 if pinned[at] else numbers[at], at), reverse=True
    )


@pytest.mark.parametrize("name", ["blockwise", "gpu"])
@pytest.mark.parametrize("kind", ["any", "equal", "zeros", "infinite"])
@pytest.mark.parametrize("n", [1, 37, 600])
def test_the_best_columns_of_each_region(name: str, kind: str, n: int) -> None:
    value = values((5, n), kind)
    counts = torch.tensor([0, 1, n // 3, n - 1, n], dtype=torch.int32)
    end = max(n - 2, 1)
    spans = torch.tensor([[[0, 0], [n, n]], [[0, 1], [end, n]], [[0, 2], [0, 0]], [[3, 5], [end, n]], [[0, n], [0, 1]]])
    for width in {n, int(counts[:4].max())}:
        rows = slice(0, 5 if width == n else 4)
        args = BestArgs(value[rows], spans[rows].int(), counts[rows], width)
        columns, is_nan = op_set(name).best_columns(args)
        assert columns.dtype == torch.int32
        assert columns.shape == (len(args.value), width)
        assert not is_nan.any()
        for row, count in enumerate(args.counts.tolist()):
            assert columns[row, :count].tolist() == sorted(ranked(value[row], spans, row)[:count]), (row, count)


@pytest.mark.parametrize("name", SETS)
def test_nan_is_told(name: str) -> None:
    value = torch.zeros(3, 600)
    value[1, 599] = torch.nan
    args = BestArgs(value, torch.zeros(3, 1, 2, dtype=torch.int32), torch.full((3,), 7, dtype=torch.int32), 7)
    assert op_set(name).best_columns(args).is_nan.tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["blockwise", "gpu"])
@pytest.mark.parametrize("kind", ["any", "equal", "zeros", "infinite"])
@pytest.mark.parametrize(("n_heads", "n"), [(1, 40), (3, 37), (8, 600)])
def test_heads_share_a_total(name: str, kind: str, n_heads: int, n: int) -> None:
    value = values((5, n_heads, n), kind)
    least = torch.tensor([2, 5, n // 3, n, 6], dtype=torch.int32)
    total = torch.tensor([n_heads * n // 4, n_heads * 9, n_heads * n // 2, n_heads * n, n_heads], dtype=torch.int32)
    spans = torch.tensor([[0, 0], [n - 2, n]]).repeat(5 * n_heads, 1, 1)
    counts = op_set(name).shared_counts(ShareArgs(value, spans.int(), least, total))
    assert counts.dtype == torch.int32
    for layer in range(5):
        floor = int(least[layer])
        own = [set(ranked(value[layer, head], spans, head)[:floor]) for head in range(n_heads)]
        left = max(int(total[layer]) - n_heads * floor, 0)
        others = [
            (float(value[layer, head, column]) + 0.0, -head, column)
            for head in range(n_heads)
            for column in range(n)
            if column not in own[head]
        ]
        won = [-head for _, head, _ in sorted(others, reverse=True)[:left]]
        assert counts[layer].tolist() == [floor + won.count(head) for head in range(n_heads)], layer


def pool(dtype: torch.dtype, key_dim: int, value_dim: int, masses: bool, n_pages: int) -> PageArrays:
    pages = PageArrays(4, 8, key_dim, value_dim, dtype, torch.device("cpu"), masses)
    for _ in range(-(-n_pages // 4)):
        pages.add_arena()
    for arenas in pages.arrays:
        for arena in arenas:
            arena.fill_(7)
    return pages


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masses", [False, True])
@pytest.mark.parametrize("where", ["in place", "same pool", "other pool"])
def test_entries_move_with_all_that_is_stored_of_them(name: str, dtype: torch.dtype, masses: bool, where: str) -> None:
    kernels, generator = op_set(name), torch.Generator().manual_seed(5)
    lens, key_dim, value_dim, n = [70, 3, 40, 0], 12, 20, 70
    pages = pool(dtype, key_dim, value_dim, masses, 80)
    table = torch.randperm(80, generator=generator).int()[:72].view(8, 9)
    source = PageRegions(pages, table[:4].contiguous(), torch.tensor(lens, dtype=torch.int32))
    keys, vals = (torch.randn(4, n, dim, generator=generator) for dim in (key_dim, value_dim))
    positions = torch.arange(n, dtype=torch.int32).expand(4, -1)
    scores, masses_of = torch.rand(4, n, generator=generator), torch.rand(4, n, generator=generator)
    index = torch.arange(n, dtype=torch.int32).expand(4, -1).contiguous()
    start = torch.zeros(4, dtype=torch.int32)
    blockwise.write(
        source, EntryRows(start, source.lens, index, keys, vals, positions, scores, masses_of if masses else None)
    )
    chosen = [sorted(torch.randperm(length, generator=generator)[: length - length // 3].tolist()) for length in lens]
    counts = torch.tensor([len(own) for own in chosen], dtype=torch.int32)
    columns = torch.tensor([own + [0] * (n - len(own)) for own in chosen], dtype=torch.int32)
    if where == "in place":
        target = source
    elif where == "same pool":
        target = PageRegions(pages, table[4:].contiguous(), source.lens)
    else:
        target = PageRegions(pool(torch.float32, key_dim, value_dim, masses, 40), table[:4] // 2, source.lens)
        target.table[:] = torch.arange(36).view(4, 9)
    kernels.move_entries(MoveArgs(source, target, columns, counts))
    found = blockwise.read(PageRegions(target.pages, target.table, counts), n)
    for r, own in enumerate(chosen):
        assert found.positions[r, : len(own)].tolist() == own
        assert torch.equal(found.keys[r, : len(own)], keys[r, own].to(dtype).to(found.keys.dtype))
        assert torch.equal(found.values[r, : len(own)], vals[r, own].to(dtype).to(found.values.dtype))
        assert torch.equal(found.scores[r, : len(own)], scores[r, own])
        if masses:
            assert torch.equal(found.log_masses[r, : len(own)], masses_of[r, own])
