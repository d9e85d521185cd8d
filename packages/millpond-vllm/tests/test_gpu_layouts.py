"""Layouts of GPU kernels and rows without null blocks, on CPU tensors."""

import pytest
import torch

from millpond_vllm.cache_layout import StridedLayout
from millpond_vllm.messages import Eviction
from millpond_vllm.null_blocks import NullBlocks
from millpond_vllm.row_compaction import without_null_blocks

HEADS, BLOCK, DIM, BLOCKS = 2, 8, 4, 10


def cache_of(order: str, dtype: torch.dtype, parts: int = 1) -> torch.Tensor:
    """Return a cache (blocks, H, block, 2 D) of different numbers, in whose memory heads or tokens come first."""
    size = BLOCK // parts
    count = BLOCKS * HEADS * BLOCK * 2 * DIM
    numbers = torch.arange(count, dtype=torch.float32)
    if order == "heads first":
        cache = numbers.view(BLOCKS * parts, HEADS, size, 2 * DIM)
    else:
        cache = numbers.view(BLOCKS * parts, size, HEADS, 2 * DIM).transpose(1, 2)
    if dtype.itemsize > 1:
        return cache.to(dtype)
    return (cache % 251).to(torch.uint8).view(dtype)


def entry(cache: torch.Tensor, block: int, head: int, at: int, parts: int) -> torch.Tensor:
    """Return one entry by the plain rule: key, then value."""
    size = BLOCK // parts
    return cache[block * parts + at // size, head, at % size].float()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
def test_entries_are_read_and_moved(order, dtype, parts):
    cache = cache_of(order, dtype, parts)
    before = cache.clone()
    layout = StridedLayout(DIM, parts)
    source = torch.tensor([3, 1, 7])
    keys, values = layout.read(cache, source)
    assert keys.shape == values.shape == (HEADS, 3 * BLOCK, DIM)
    assert keys.dtype == dtype
    for head in range(HEADS):
        for column in (0, 5, 8, 23):
            want = entry(before, int(source[column // BLOCK]), head, column % BLOCK, parts)
            got = torch.cat([keys[head, column].float(), values[head, column].float()])
            assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(want))
    columns = torch.stack([torch.arange(0, 16), torch.arange(8, 24)])[:, :, None].expand(-1, -1, DIM)
    assert torch.equal(layout.read_keys(cache, source).view(torch.uint8), keys.contiguous().view(torch.uint8))
    raw = (lambda part: part.view(torch.uint8)) if dtype.itemsize == 1 else (lambda part: part)
    moved = [raw(part).gather(1, columns).view(dtype) for part in (keys, values)]
    layout.write(cache, torch.tensor([5, 2]), *moved)
    again = layout.read(cache, torch.tensor([5, 2]))
    assert all(torch.equal(raw(one), raw(two)) for one, two in zip(again, moved, strict=True))
    untouched = [block * parts + part for block in range(BLOCKS) if block not in (5, 2) for part in range(parts)]
    assert torch.equal(raw(cache)[untouched], raw(before)[untouched])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
def test_keys_are_found_where_they_lie(order, parts):
    """Sums of attention read the keys of all blocks in place."""
    cache = cache_of(order, torch.float32, parts)
    layout = StridedLayout(DIM, parts)
    lying, found = layout.keys(cache)
    assert lying.data_ptr() == cache.data_ptr()
    assert lying.shape[:2] == (BLOCKS, HEADS)
    for block in range(BLOCKS):
        want = layout.read_keys(cache, torch.tensor([block]))
        assert torch.equal(lying[block][:, found.at.flatten()].view(HEADS, BLOCK, DIM), want)


def test_rows_lose_their_null_blocks():
    rows = torch.tensor([[4, 5, 0, 0, 6, 7, 0], [1, 2, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    packed, lengths = without_null_blocks(rows, torch.tensor([43, 20, 0], dtype=torch.int32), 8)
    assert packed[0, :4].tolist() == [4, 5, 6, 7]
    assert packed[1, :3].tolist() == [1, 2, 3]
    assert lengths.tolist() == [27, 20, 0]


def test_null_blocks_of_small_kernel_blocks_are_seen():
    """A kernel with blocks of 4 sees the manager's block b as 2 b and 2 b + 1, and the null block as 0 and 1."""
    rows = torch.tensor([[8, 9, 0, 1, 0, 1, 12, 13]], dtype=torch.int32)
    packed, lengths = without_null_blocks(rows, torch.tensor([30], dtype=torch.int32), 4, parts=2)
    assert packed[0, :4].tolist() == [8, 9, 12, 13]
    assert lengths.tolist() == [14]


def test_rows_of_a_graph_that_is_recorded_keep_a_token():
    rows = torch.zeros(2, 4, dtype=torch.int32)
    _, lengths = without_null_blocks(rows, torch.tensor([32, 17], dtype=torch.int32), 8)
    assert lengths.tolist() == [1, 1]


def eviction(request: str, row: list[int]) -> Eviction:
    return Eviction(request, [], [], [], 0, 0, row)


def test_lengths_on_the_host_follow_the_orders():
    names: list[str | None] | None = ["b", "a", None]
    nulls = NullBlocks(8, lambda step: names)
    lengths = torch.tensor([50, 60, 0, 0], dtype=torch.int32)
    assert nulls.shortened(lengths, None) is lengths, "nobody has evicted"
    nulls.take([eviction("a", [3, 0, 0, 4]), eviction("c", [0])])
    assert nulls.shortened(lengths, None).tolist() == [50, 44, 0, 0]
    nulls.take([eviction("a", [3, 0, 0, 0, 4])])
    assert nulls.shortened(lengths, None).tolist() == [50, 36, 0, 0]
    names = None
    assert nulls.shortened(lengths, None) is None, "a backend that plans on the host asks the device then"
    nulls.forget({"a", "c"})
    assert nulls.shortened(lengths, None) is lengths
    assert nulls.shortened(None, None) is None
