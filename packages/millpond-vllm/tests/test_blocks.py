import pytest
import torch

from millpond import UnsupportedModelError
from millpond.plugins import AttentionShape, make_policy
from millpond_vllm.cache_layout import HeadMajorLayout
from millpond_vllm.planning import Competition, kept_columns
from millpond_vllm.row_compaction import without_null_blocks


def test_rows_lose_null_blocks_and_lengths_what_these_held():
    rows = torch.tensor([[7, 0, 0, 9, 5], [1, 2, 3, 0, 0], [4, 0, 6, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([149, 70, 90], dtype=torch.int32)  # blocks behind the length are no null blocks
    packed, shorter = without_null_blocks(rows, lengths, 32)
    assert packed[:, :3].tolist() == [[7, 9, 5], [1, 2, 3], [4, 6, 0]]
    assert shorter.tolist() == [149 - 64, 70, 90 - 32]


def scrambled(block, dim, seed):
    """A writer of blocks in an order of its own, as the kernels of some processors have."""
    orders = [torch.randperm(block * dim, generator=torch.Generator().manual_seed(seed + i)) for i in range(2)]

    def write(keys, values, cache, slots):
        parts = cache.view(len(cache), cache.shape[1], 2, -1)
        for index, rows in enumerate((keys, values)):
            flat = rows.transpose(0, 1).reshape(cache.shape[1], -1).to(cache.dtype)
            parts[int(slots[0]) // block, :, index] = flat[:, orders[index]]

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("block", "dim"), [(32, 64), (16, 128), (32, 80)])
def test_the_order_inside_a_block_is_found(block, dim, dtype):
    heads = 2
    write = scrambled(block, dim, 1)
    layout = HeadMajorLayout.probe(heads, block, dim, (dtype, dtype, dtype), write)
    keys, values = torch.randn(2, block, heads, dim).to(dtype)
    cache = torch.zeros(3, heads, block, 2 * dim, dtype=dtype)
    write(keys, values, cache, torch.arange(2 * block, 3 * block))
    read = layout.read(cache.view(torch.uint8).view(dtype), torch.tensor([2, 0]))
    assert torch.equal(read[0][:, :block].float(), keys.transpose(0, 1).float())
    assert torch.equal(read[1][:, :block].float(), values.transpose(0, 1).float())
    assert not read[0][:, block:].float().any()
    layout.write(cache, torch.tensor([1]), read[0][:, :block], read[1][:, :block])
    assert torch.equal(cache[1].float(), cache[2].float())


def test_an_order_that_is_none_is_refused():
    def write(keys, values, cache, slots):
        cache[:] = 1

    with pytest.raises(UnsupportedModelError, match="order that is not known"):
        HeadMajorLayout.probe(2, 32, 32, (torch.float32,) * 3, write)


def competition(n=96, compete=64, heads=4, dim=16, **given):
    torch.manual_seed(0)
    positions = torch.arange(n, dtype=torch.int32).expand(heads, n)
    return Competition(torch.randn(heads, n, dim), torch.randn(heads, n, dim), positions, compete, n, 0, **given)


SHAPE = AttentionShape(0.25)


def test_heads_keep_their_own_best_and_the_newest_stay():
    sums = torch.rand(4, 96)
    columns = kept_columns(make_policy("h2o", {"sinks": 0}), competition(sums=sums), 32, SHAPE)
    wanted = sums[:, :64].topk(32).indices.sort().values
    assert torch.equal(columns, wanted)


def test_sinks_of_a_request_and_spans_stay():
    sums = torch.rand(4, 96)
    policy = make_policy("h2o", {"sinks": 0})
    columns = kept_columns(policy, competition(sums=sums), 32, SHAPE, sinks=3, spans=((20, 24), (60, 70)))
    stays = {0, 1, 2, 20, 21, 22, 23, 60, 61, 62, 63}
    rest = sums[:, :64].clone()
    rest[:, sorted(stays)] = -1
    for row, own in zip(columns, rest, strict=True):
        assert set(row.tolist()) == stays | set(own.topk(32 - len(stays)).indices.tolist())


def test_broken_attention_keeps_the_newest():
    sums = torch.full((4, 96), torch.nan)
    columns = kept_columns(make_policy("h2o", {"sinks": 2}), competition(sums=sums), 32, SHAPE)
    assert columns.tolist() == [[0, 1, *range(34, 64)]] * 4
