"""Preloading by layer: a prompt begins while later layers of its chunks are read, and again where one is bad."""

from __future__ import annotations

import json
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.cache.chunks.file_format import LayerReader
from millpond.cache.chunks.layered import LayeredVariant, LostLayerError
from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.tiers import ChunkUse
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.models.lean.block import Block
from millpond.policy.reuse import layers_before_start
from tests.cache.test_chunk_files import SHAPE, file_of, opened, variant
from tests.helpers.engine.chunked import QUESTION, A, B, C, ask, chunked, ids_of
from tests.helpers.engine.helpers import add, greedy, prompt, tokens
from tests.helpers.hf.families import family

LAYERS = 5
ASKED = chunked(mp.Chunk(B), mp.Chunk(A), mp.Chunk(C), QUESTION)


@cache
def five_layers() -> Any:
    return family("llama").make(num_hidden_layers=LAYERS)


def engine(folder: Path, **options: Any) -> Engine:
    """An engine whose chunks lie in files alone, and that has measured its passes."""
    store = ChunkStore(folder, memory=1, **options)
    of = Engine(five_layers(), method="full", chunk_store=store, page_slots=4, max_step_tokens=256)
    for chunk in (A, B, C):
        ask(of, chunked(prompt(9), mp.Chunk(chunk), QUESTION), new=1)
    return of


def begins_at_once(of: Engine) -> None:
    """Let prompts begin after the first layer, as where computing takes far longer than reading."""
    reuse = of._parts.chunk_reuse
    assert reuse is not None
    reuse.row_s, reuse.passed = 1e3, lambda *_: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("compute_s", "load_s", "expected"), [(1, 1, 1), (2, 1, 1), (0, 1, 30), (0.5, 1, 16), (0.9, 1, 4), (0.25, 2, 27)]
)
def test_layers_before_the_start(compute_s: float, load_s: float, expected: int) -> None:
    n_in = layers_before_start(30, compute_s, load_s)
    assert n_in == expected
    for layer in range(30):  # computed at the earliest after those before it, and loaded by then
        assert layer < n_in or load_s * (layer + 1) <= load_s * n_in + compute_s * layer + 1e-9


def test_the_first_token_takes_the_longer_of_loading_and_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held to what reading and computing took by themselves in the same run, however busy the machine is."""
    of, pause = engine(tmp_path), 0.12
    begins_at_once(of)
    reads: list[tuple[float, float]] = []
    passes: list[tuple[float, float]] = []
    read, forward = LayerReader.read, Block.forward

    def slept(seconds: float, spans: list[tuple[float, float]]) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        spans.append((began, time.perf_counter()))

    def slow_read(reader: LayerReader, layer: int) -> Any:
        slept(pause / 3, reads)  # for each of three chunks
        return read(reader, layer)

    def slow_forward(block: Block, x: Any, *given: Any) -> Any:
        if len(x) > 1:
            slept(pause, passes)
        return forward(block, x, *given)

    monkeypatch.setattr(LayerReader, "read", slow_read)
    monkeypatch.setattr(Block, "forward", slow_forward)
    found = ask(of, ASKED, new=1)
    assert found.completions[0].kv.reused_tokens > 0
    assert (len(reads), len(passes)) == (3 * LAYERS, LAYERS)
    loads, computes = (sum(end - began for began, end in spans) for spans in (reads, passes))
    took = passes[-1][1] - reads[0][0]
    assert max(loads, computes) < took < 0.85 * (loads + computes), f"{took:.2f} s of {loads:.2f} and {computes:.2f} s"
    of.close()


def test_the_same_tokens_as_read_before(tmp_path: Path) -> None:
    early, whole = engine(tmp_path / "one"), engine(tmp_path / "other")
    begins_at_once(early)
    for recompute in ("auto", 0, 0.3):
        one, other = ask(early, ASKED, recompute=recompute), ask(whole, ASKED, recompute=recompute)
        assert tokens(one) == tokens(other)
        assert one.completions[0].kv.reused_tokens == other.completions[0].kv.reused_tokens > 0
    for each in (early, whole):
        assert [loads.n_bytes for loads in each._parts.file_loads] == [0]
        assert not each.config.chunk_store._files._rule._pins
        each.close()


def spoil(folder: Path, layer: int, n: int = 1) -> None:
    """Change a byte of the values of one layer in the files of n chunks."""
    for path in sorted(folder.glob("??/*/*.safetensors"))[:n]:
        data = bytearray(path.read_bytes())
        head = 8 + int.from_bytes(data[:8], "little")
        begin, _ = json.loads(data[8:head])[f"values.{layer}"]["data_offsets"]
        data[head + begin] ^= 0x10
        path.write_bytes(data)


@pytest.mark.parametrize(("layer", "bad"), [(LAYERS - 1, 1), (2, 3)])
def test_a_bad_layer_midway_begins_the_prompt_again(tmp_path: Path, layer: int, bad: int) -> None:
    of = engine(tmp_path)
    begins_at_once(of)
    expected = ask(of, ids_of(ASKED))
    gate = threading.Event()
    read = LayerReader.read

    def waits(reader: LayerReader, number: int) -> Any:
        if number == layer:
            assert gate.wait(60)
        return read(reader, number)

    spoil(tmp_path, layer, bad)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LayerReader, "read", waits)
        threading.Timer(0.3, gate.set).start()  # by then its pass waits for that layer
        add(of, Request(request_id="x", prompt=ASKED, params=greedy(8, logprobs=0)))
        done = []
        while of.busy:
            done += [output for output in of.step() if output.finished]
            of.check_integrity()
    (found,) = done
    assert found.error is None
    assert of.stats().chunks.torn == bad  # type: ignore[union-attr]
    assert of.stats().chunks.begun_again == 1  # type: ignore[union-attr]
    assert of._faults.n_restarted == 0, "the pass has not failed"
    if bad == 3:
        assert tokens(found) == tokens(expected), "all of it is computed"
        assert found.completions[0].kv.reused_tokens == 0
    else:
        assert found.completions[0].kv.reused_tokens > 0
    assert [loads.n_bytes for loads in of._parts.file_loads] == [0]
    of.close()


def test_others_go_on_when_a_layer_is_bad(tmp_path: Path) -> None:
    of = engine(tmp_path)
    begins_at_once(of)
    plain = prompt(40)
    expected = ask(of, plain, new=12)
    spoil(tmp_path, LAYERS - 1, 3)
    add(of, Request(request_id="plain", prompt=plain, params=greedy(12, logprobs=0)))
    add(of, Request(request_id="chunks", prompt=ASKED, params=greedy(4, logprobs=0)))
    done = {}
    while of.busy:
        done |= {output.request_id: output for output in of.step() if output.finished}
    assert [done[name].error for name in ("plain", "chunks")] == [None, None]
    assert tokens(done["plain"]) == tokens(expected)
    of.close()


def test_a_reader_reads_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(variant())
    data = file_of(tmp_path).read_bytes()
    key = variant().facts.chunk

    def layered(content: bytes) -> LayeredVariant | None:
        path = next(tmp_path.glob("??/*"))
        path.mkdir(exist_ok=True)
        (path / f"{variant().facts.name}.safetensors").write_bytes(content)
        facts = variant().facts
        found = store.open_layers(facts, 0.5, ChunkUse(1))
        if found is not None:
            store.read_layer(found, 0)
            found.close()
        return found

    found = layered(data)
    assert found is not None
    assert found.facts.chunk == key
    assert torch.equal(found.keys(0), variant().keys[0])
    assert torch.equal(found.values(0), variant().values[0])
    assert found.nbytes == SHAPE.nbytes(2)
    unharmed = 0
    for i in range(len(data)):
        changed = layered(data[:i] + bytes([data[i] ^ 0x15]) + data[i + 1 :])
        if changed is not None and not changed.is_lost:
            assert torch.equal(changed.keys(0), variant().keys[0])
            assert torch.equal(changed.values(0), variant().values[0])
            unharmed += 1
    assert unharmed < 16, "a changed blank of the header harms nothing"
    for n in [*range(0, len(data), 31), len(data) + 1]:
        lost = layered((data + b"\0")[:n])
        assert lost is None or lost.is_lost
    assert found.stored().facts == variant().facts


def test_a_lost_layer_is_no_layer(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(variant())
    found = store.open_layers(variant().facts, 0.5, ChunkUse(1))
    assert found is not None
    found.close()
    with pytest.raises(LostLayerError, match=r"layer 0 of the chunk .* has not been read"):
        found.keys(0)
