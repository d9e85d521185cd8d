"""Chunks at rest in a storage codec: their bytes, what prompts take from them, and files of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import millpond as mp
from millpond.cache.chunks.coded import ChunkCodec
from millpond.cache.chunks.variant import ChunkVariant, StoredShape, VariantFacts, ids_key
from millpond.codec.transform.storage_codec import parse_storage_codec
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import CacheOptions
from millpond.errors import DataError, OptionError
from millpond.hf.calibration.load import rotations_before_rope
from millpond.hf.model_support import supported
from tests.helpers.engine.coded import CODEC, agreement, answer, asked, engine_of, first_choices, prompt, run
from tests.helpers.hf.transform import ids, tiny, transform_of_tiny

BEGIN, CHUNK, QUESTION = prompt(40, 3), prompt(300, 4)[1:], prompt(30, 5)[1:]


def variant(n: int) -> ChunkVariant:
    """A chunk as a model computed it."""
    model = tiny("gqa")
    rotations = rotations_before_rope(supported(model))
    keys, values = [], []
    with torch.no_grad(), mp.compress(model, "full") as kept:
        model(ids(n, 7)[None], cache=kept)
        for layer_cache, rotary in zip(kept.layer_caches, rotations, strict=True):
            entries = layer_cache.read(0)
            assert rotary is not None
            keys.append(rotary.rotate(entries.keys[None], torch.arange(n)[None], inverse=True)[0])
            values.append(entries.values)
    return ChunkVariant(
        VariantFacts(ids_key([n]), n, ids_key([7]), (), (), 0.5, True), torch.ones(n), tuple(keys), tuple(values)
    )


def shape(name: str = CODEC) -> StoredShape:
    transform = transform_of_tiny("gqa")
    return StoredShape(
        "m", torch.float32, transform.model.shapes, codec=ChunkCodec.of(transform, parse_storage_codec(name))
    )


@pytest.mark.parametrize("n", [3, 31, 32, 100, 300])
def test_whole_groups_are_coded_and_other_tokens_kept(n: int) -> None:
    given, own = variant(n), shape("transform:4")
    kept = given.stored(own)
    assert own.fits(n, kept.tensors)
    assert kept.nbytes == own.nbytes(n)
    exact = [*range(min(4, n)), *range(max(n // 32 * 32, 4), n)]
    for layer in range(2):
        for old, new in ((given.keys[layer], kept.keys(layer)), (given.values[layer], kept.values(layer))):
            assert torch.equal(new[:, exact], old[:, exact].bfloat16().float())
            if n >= 100:
                error = (new - old)[:, 4 : n // 32 * 32].square().mean() / old.var()
                assert 0 < float(error) < 0.5
    if n == 300:
        numbers = sum(side.numel() for side in (*given.keys, *given.values))
        assert given.stored(shape()).nbytes < 0.3 * 2 * numbers


def test_a_damaged_page_is_found() -> None:
    kept = variant(100).stored(shape())
    kept.tensors["pages.1"][1, 20] ^= 1
    kept.keys(0)
    with pytest.raises(DataError, match="layer 1: page 1 is damaged"):
        kept.values(1)


def reply(engine: Engine, known: list[int] | None = None, recompute: float = 0.15) -> RequestOutput:
    request = asked("r", (), 24, known or (), cache=CacheOptions(recompute=recompute))
    engine.add(replace(request, prompt=mp.Prompt([tuple(BEGIN), mp.Chunk(tuple(CHUNK)), tuple(QUESTION)])))
    return run(engine)["r"]


def test_prompts_take_coded_chunks_from_files(tmp_path: Path) -> None:
    """What follows is what follows chunks in the model's own numbers, nearly always."""
    sizes, found = [], []
    for dtype in ("auto", CODEC):
        folder = tmp_path / dtype.partition(":")[0]
        expected = found[0] if found else None
        for turn in range(2):  # the second engine reads the file
            engine = engine_of(chunk_store=mp.ChunkStore(folder, dtype=dtype))
            output = reply(engine, expected)
            kv = output.completions[0].kv
            assert kv is not None
            assert (kv.reused_tokens > 0) == (turn == 1)
            assert kv.exact == (turn == 0 or dtype == "auto")
            engine.close()
        (file,) = folder.glob("??/*/*.safetensors")
        sizes.append(file.stat().st_size)
        found.append(answer(output) if not found else first_choices(output))
    assert sizes[1] < 0.3 * sizes[0]
    assert agreement(found[0], found[1]) >= 0.85


def test_a_store_needs_the_transform_of_the_engine() -> None:
    with pytest.raises(OptionError, match=r"needs the model's transform: .* storage_codec='transform:1.5'"):
        engine_of(storage_codec=None, chunk_store=mp.ChunkStore(None, dtype=CODEC))
    with pytest.raises(OptionError, match=r"0.5 to 4 bits"):
        mp.ChunkStore(None, dtype="transform:9")


def test_a_folder_is_of_one_transform(tmp_path: Path) -> None:
    engine_of(chunk_store=mp.ChunkStore(tmp_path, dtype=CODEC)).close()
    with pytest.raises(OptionError, match=r"open it with dtype='transform:1.5'"):
        engine_of(chunk_store=mp.ChunkStore(tmp_path, dtype="transform:2"))
    with pytest.raises(OptionError, match=r"open it with dtype='transform:1.5'"):
        engine_of(chunk_store=mp.ChunkStore(tmp_path))
