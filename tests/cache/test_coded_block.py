"""Blocks of a prefix tree as codes: what comes back, that codes depend on the beginning alone, and damage."""

from __future__ import annotations

import pytest
import torch

from millpond.cache.pages.pool import PagePool
from millpond.cache.swap import read_pages
from millpond.cache.tiered.block_tokens import LayerTokens, as_pages, read_tokens, write_block
from millpond.cache.tiered.coded_block import BlockCodec
from millpond.errors import DataError
from millpond.hf.calibration.load import rotations_before_rope
from millpond.hf.model_support import supported
from tests.helpers.hf.transform import ids, tiny, transform_of_tiny

SLOTS, N = 32, 160
KIND = "biases"


def codec(slots: int = SLOTS, dtype: torch.dtype = torch.float32, bits: float = 1.5) -> BlockCodec:
    rotations = rotations_before_rope(supported(tiny(KIND)))
    return BlockCodec(transform_of_tiny(KIND), bits, rotations, slots, dtype)


@torch.no_grad()
def tokens(n: int = N) -> list[LayerTokens]:
    """Keys after RoPE and values of a text that the model has read."""
    cache = tiny(KIND)(ids(n, 9)[None], use_cache=True).past_key_values
    return [LayerTokens(layer.keys[0], layer.values[0], None) for layer in cache.layers]


def some_exact(n: int = N) -> torch.Tensor:
    exact = torch.zeros(2, n, dtype=torch.bool)
    exact[:, :4] = exact[0, 40] = exact[1, 63] = exact[0, 120] = True
    return exact


def test_what_is_coded_comes_back_close_and_exact_tokens_as_they_were() -> None:
    given, exact = tokens(), some_exact()
    blocks = codec(bits=3).encode(0, given, exact)
    assert [len(block) for block in blocks] == [
        codec(bits=3).nbytes(exact[:, at : at + SLOTS]) for at in range(0, N, SLOTS)
    ]
    for layer, (found, before) in enumerate(zip(codec(bits=3).decode(0, blocks), given, strict=True)):
        for side in (0, 1):
            error = (found[side] - before[side]).norm() / (before[side] - before[side].mean(1, keepdim=True)).norm()
            assert error < 0.5
            same = found[side][:, exact[layer]]
            assert torch.equal(same, before[side][:, exact[layer]].bfloat16().float())


def test_codes_depend_on_the_beginning_alone() -> None:
    given, exact = tokens(), some_exact()
    whole = codec().encode(0, given, exact)
    for first, end in ((0, 32), (32, 96), (96, 160)):
        part = [LayerTokens(layer.keys[:, first:end], layer.values[:, first:end], None) for layer in given]
        alone = codec().encode(first, part, exact[:, first:end])
        assert all(map(torch.equal, alone, whole[first // SLOTS : end // SLOTS]))
    one_by_one = [codec().decode(at * SLOTS, [block])[0].keys for at, block in enumerate(whole)]
    assert torch.equal(torch.cat(one_by_one, 1), codec().decode(0, whole)[0].keys)


def test_blocks_of_more_pages_and_half_precision() -> None:
    given = [LayerTokens(t.keys[:, :128].half(), t.values[:, :128].half(), None) for t in tokens()]
    coder = codec(64, torch.float16)
    blocks = coder.encode(0, given, some_exact(128))
    assert len(blocks) == 2
    found = coder.decode(64, blocks[1:])
    assert found[0].keys.dtype == torch.float16
    assert found[0].keys.shape == given[0].keys[:, 64:].shape


def test_scores_are_exact() -> None:
    given = [t._replace(scores=torch.rand(t.keys.shape[:2])) for t in tokens()]
    blocks = codec().encode(0, given, some_exact())
    assert len(blocks[0]) == codec().nbytes(some_exact()[:, :SLOTS], scores=True)
    for found, before in zip(codec().decode(32, blocks[1:3]), given, strict=True):
        assert found.scores is not None
        assert before.scores is not None
        assert torch.equal(found.scores, before.scores[:, 32:96])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.03, 0.2, 0.5, 0.8, 0.999])
def test_a_flipped_bit_is_found(share: float) -> None:
    block = codec().encode(0, tokens(), some_exact())[0].clone()
    block[int(share * len(block))] ^= 4
    with pytest.raises(DataError, match="damaged"):
        codec().decode(0, [block])


def test_a_block_of_another_place_is_found() -> None:
    blocks = codec().encode(0, tokens(), some_exact())
    with pytest.raises(DataError, match="another"):
        codec().decode(0, [blocks[1]])


def test_tokens_go_to_pages_and_come_back() -> None:
    given = [t._replace(scores=torch.rand(t.keys.shape[:2])) for t in tokens(64)]
    pool = PagePool(given[0].keys.shape[2], given[0].values.shape[2], torch.float32, slots=SLOTS)
    pools = [pool, pool]
    blocks = [[pool.allocate(2) for _ in pools] for _ in range(2)]
    for pages, content in zip(blocks, as_pages(pools, given, SLOTS, 0), strict=True):
        write_block(pools, pages, content)
    for found, before in zip(read_tokens(pools, blocks), given, strict=True):
        assert all(map(torch.equal, found, before))
    positions = read_pages(pool, blocks[1][0])[2]
    assert positions[0].tolist() == list(range(32, 64))
