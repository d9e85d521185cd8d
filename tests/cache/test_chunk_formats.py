"""Number formats of stored chunks: what is kept of a number, how many bytes it takes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.variant import GROUP, ChunkVariant, RestName, StoredShape, VariantFacts, ids_key
from millpond.errors import OptionError

LAYERS = ((2, 64, 64), (1, 20, 7))


def shape(rest: RestName = "auto", dtype: torch.dtype = torch.float32) -> StoredShape:
    return StoredShape("m", dtype, LAYERS, rest)


def variant(n: int = 45, dtype: torch.dtype = torch.float32) -> ChunkVariant:
    torch.manual_seed(n)
    large = torch.where(torch.arange(64) % 16 == 3, 40.0, 1.0)  # a few channels of keys are large throughout
    keys = [torch.randn(2, n, 64) * large, torch.randn(1, n, 20)]
    values = [torch.randn(heads, n, dim) for heads, _, dim in LAYERS]
    facts = VariantFacts(ids_key([n]), n, ids_key([7]), ("a",), (1.5,), 0.7, True)
    return ChunkVariant(facts, torch.ones(n), tuple(k.to(dtype) for k in keys), tuple(v.to(dtype) for v in values))


def spread(x: Tensor, is_key: bool) -> Tensor:
    """Of each number: the width of its group."""
    wide = torch.empty_like(x)
    if is_key:
        for begin in range(0, x.shape[1], GROUP):
            part = x[:, begin : begin + GROUP]
            wide[:, begin : begin + GROUP] = part.amax(1, keepdim=True) - part.amin(1, keepdim=True)
        return wide
    group = GROUP if x.shape[2] % GROUP == 0 else x.shape[2]
    for begin in range(0, x.shape[2], group):
        part = x[:, :, begin : begin + group]
        wide[:, :, begin : begin + group] = part.amax(2, keepdim=True) - part.amin(2, keepdim=True)
    return wide


@pytest.mark.parametrize("rest", ["int8", "int4"])
@pytest.mark.parametrize("n", [1, 31, 32, 45, 96])
def test_a_code_is_within_half_a_step_of_its_number(rest: RestName, n: int) -> None:
    given = variant(n)
    kept = given.stored(shape(rest))
    most = 255 if rest == "int8" else 15
    for layer in range(len(LAYERS)):
        for old, new, is_key in (
            (given.keys[layer], kept.keys(layer), True),
            (given.values[layer], kept.values(layer), False),
        ):
            assert new.shape == old.shape
            step = spread(old, is_key) / most
            rounding = 2e-3 * (old.abs().amax() + step * most)  # of scales and zeros, which are float16
            assert bool(((new - old).abs() <= step / 2 + rounding).all())
            if n > 1:
                assert float((new - old).abs().max()) > 0


@pytest.mark.parametrize("rest", ["auto", "float32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_are_kept_as_they_are_or_rounded_once(rest: RestName, dtype: torch.dtype) -> None:
    given, own = variant(dtype=dtype), shape(rest, dtype)
    kept = given.stored(own)
    there = {"auto": dtype, "float32": torch.float32, "bf16": torch.bfloat16}[rest]
    for layer in range(len(LAYERS)):
        assert torch.equal(kept.keys(layer), given.keys[layer].to(there))
        assert torch.equal(kept.values(layer), given.values[layer].to(there))
    assert own.format.exact == all(torch.equal(kept.keys(i).to(dtype), given.keys[i]) for i in range(len(LAYERS)))


@pytest.mark.parametrize("rest", ["auto", "bf16", "int8", "int4"])
def test_both_tiers_count_the_bytes_of_the_format(rest: RestName, tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, dtype=rest)
    store.bind(shape())
    given = variant()
    store.put(given)
    n_numbers = sum(t.numel() for t in (*given.keys, *given.values))
    bits = {"auto": 32, "bf16": 16, "int8": 8, "int4": 4}[rest]
    stats = store.stats()
    held = given.stored(shape(rest))
    assert stats.memory_bytes == held.nbytes == shape(rest).nbytes(45)
    extra = 0 if rest in ("auto", "bf16") else 0.3  # scales and zeros: a bit each of 32 numbers, more in the odd layer
    assert bits / 8 <= (stats.memory_bytes - 45 * 4) / n_numbers <= bits / 8 + extra
    (file,) = tmp_path.glob("??/*/*.safetensors")
    assert stats.disk_bytes == file.stat().st_size
    assert held.nbytes < stats.disk_bytes < held.nbytes + 4096
    other = ChunkStore(tmp_path, dtype=rest)
    other.bind(shape())
    (facts,) = other.find(given.facts.chunk)
    found = other.take(facts, 1.0)
    assert found is not None
    assert all(torch.equal(t, held.tensors[name]) for name, t in found.tensors.items())


def test_a_folder_is_of_one_format(tmp_path: Path) -> None:
    ChunkStore(tmp_path, dtype="int8").bind(shape())
    for wrong in ("auto", "bf16", "int4"):
        with pytest.raises(OptionError, match="in another format; open it with dtype='int8'"):
            ChunkStore(tmp_path, dtype=wrong).bind(shape())
    with pytest.raises(OptionError, match="of another model"):
        ChunkStore(tmp_path, dtype="int8").bind(StoredShape("other", torch.float32, LAYERS))


def test_a_file_of_another_format_is_foreign(tmp_path: Path) -> None:
    for rest in ("int8", "int4"):
        store = ChunkStore(tmp_path / rest, dtype=rest, memory=1)
        store.bind(shape())
        store.put(variant())
    (one,), (other,) = ((tmp_path / rest).glob("??/*/*.safetensors") for rest in ("int8", "int4"))
    one.write_bytes(other.read_bytes())
    store = ChunkStore(tmp_path / "int8", dtype="int8", memory=1)
    store.bind(shape())
    assert store.find(variant().facts.chunk) == []
    assert store.stats().foreign == 1


def test_numbers_that_no_code_can_hold_are_not_kept() -> None:
    store = ChunkStore(None, dtype="int8")
    store.bind(shape())
    given = variant()
    given.values[0][0, 3, 5] = torch.nan
    store.put(given)
    assert store.find(given.facts.chunk) == []
    assert (store.stats().not_finite, store.stats().stored) == (1, 0)


def test_an_unknown_format() -> None:
    with pytest.raises(OptionError, match="unknown dtype of a chunk store 'int6'"):
        ChunkStore(None, dtype="int6")
