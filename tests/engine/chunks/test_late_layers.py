"""A disk that stops giving layers of chunks: other requests go on, and after a timeout the chunks are computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.cache.chunks.file_format import LayerReader
from millpond.cache.chunks.files import ChunkFiles
from millpond.cache.chunks.store import ChunkStore
from millpond.engine import file_loader
from millpond.engine.chunks import late
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError
from tests.engine.chunks.test_preload import ASKED, begins_at_once, engine
from tests.helpers.engine.chunked import QUESTION, B, C, ask, chunked, ids_of
from tests.helpers.engine.helpers import add, greedy, prompt, tokens

#: Longer than any step of these engines, shorter than a blocked one.
STEP_S = 5.0
OTHER = chunked(mp.Chunk(C), mp.Chunk(B), QUESTION)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk(monkeypatch)
    yield found
    found.gate.set()


class Disk:
    """A disk that gives nothing from a layer on, until its gate is set.

    Attributes:
        gate: Set while it gives all.
        stops_at: Layer that it does not give; -1: files cannot even be opened.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.stops_at = threading.Event(), 99
        self.gate.set()
        read, init = LayerReader.read, LayerReader.__init__

        def reads(reader: LayerReader, layer: int) -> Any:
            if layer >= self.stops_at:
                assert self.gate.wait(60)
            return read(reader, layer)

        def opens(reader: LayerReader, *given: Any) -> None:
            if self.stops_at < 0:
                assert self.gate.wait(60)
            init(reader, *given)

        monkeypatch.setattr(LayerReader, "read", reads)
        monkeypatch.setattr(LayerReader, "__init__", opens)

    def stop(self, layer: int) -> None:
        self.stops_at = layer
        self.gate.clear()


def add_chunks(of: Engine, name: str = "chunks", asked: mp.Prompt = ASKED, **options: Any) -> None:
    cache = CacheOptions(**options)
    add(of, Request(request_id=name, prompt=asked, params=greedy(8, logprobs=0), cache=cache))


def run_until(of: Engine, *names: str, done: dict[str, Any] | None = None) -> dict[str, Any]:
    """Step until some requests have ended; no step waits for the disk."""
    done = {} if done is None else done
    until = time.monotonic() + 30
    while not done.keys() >= set(names):
        assert time.monotonic() < until, f"{names} do not end"
        began = time.monotonic()
        done |= {output.request_id: output for output in of.step() if output.finished}
        assert time.monotonic() - began < STEP_S, "a step waits for the disk"
        of.check_integrity()
    return done


@pytest.mark.parametrize(("layer", "again"), [(3, 1), (1, 1), (0, 0), (-1, 0)])
def test_tokens_of_others_go_on_while_a_layer_is_missing(tmp_path: Path, disk: Disk, layer: int, again: int) -> None:
    of = engine(tmp_path, keep_above=1)
    plain, expected = prompt(40), ask(of, ASKED)
    others = ask(of, plain, new=12)
    begins_at_once(of)
    disk.stop(layer)
    add(of, Request(request_id="before", prompt=plain, params=greedy(12, logprobs=0)))
    add_chunks(of)
    done = run_until(of, "before")
    add(of, Request(request_id="behind", prompt=plain, params=greedy(12, logprobs=0)))
    done = run_until(of, "behind", done=done)
    assert "chunks" not in done
    assert [tokens(done[name]) for name in ("before", "behind")] == [tokens(others)] * 2
    disk.gate.set()
    done = run_until(of, "chunks", done=done)
    assert tokens(done["chunks"]) == tokens(expected)
    assert done["chunks"].completions[0].kv.reused_tokens == expected.completions[0].kv.reused_tokens > 0
    stats = of.stats().chunks
    assert stats is not None
    assert (stats.begun_again, stats.load_timeouts, of._faults.n_restarted) == (again, 0, 0)
    assert [loads.n_bytes for loads in of._parts.file_loads] == [0]
    assert not of.config.chunk_store._files._rule._pins  # type: ignore[union-attr]
    of.close()


def in_the_loading_thread_alone(call: Any) -> Any:
    def checked(*given: Any, **named: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "a step touches a disk that hangs"
        return call(*given, **named)

    return checked


@pytest.mark.parametrize("layer", [3, 0, -1])
def test_after_the_timeout_chunks_are_computed(
    tmp_path: Path, disk: Disk, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = engine(tmp_path, keep_above=1, load_timeout_s=0.4)
    expected = {name: ask(of, ids_of(asked)) for name, asked in (("chunks", ASKED), ("other", OTHER))}
    begins_at_once(of)
    disk.stop(layer)
    with monkeypatch.context() as patched:
        for name in ("write", "names", "facts", "remove"):
            patched.setattr(ChunkFiles, name, in_the_loading_thread_alone(getattr(ChunkFiles, name)))
        add_chunks(of)
        add_chunks(of, "other", OTHER)
        done = run_until(of, "chunks", "other")
    for name, output in done.items():
        assert tokens(output) == tokens(expected[name])
        assert output.completions[0].kv.reused_tokens == 0
        assert output.error is None
    stats = of.stats().chunks
    assert stats is not None
    assert (stats.load_timeouts, stats.begun_again) == (2, int(layer > 0))
    disk.gate.set()
    until = time.monotonic() + 30
    while of._parts.chunk_loads._loader.stuck_s and time.monotonic() < until:  # type: ignore[union-attr]
        time.sleep(0.01)
    add_chunks(of, "later")
    later = run_until(of, "later")["later"]
    assert later.completions[0].kv.reused_tokens > 0, "the disk gives again"
    assert of.stats().chunks.load_timeouts == 2  # type: ignore[union-attr]
    assert [loads.n_bytes for loads in of._parts.file_loads] == [0]
    assert not of.config.chunk_store._files._rule._pins  # type: ignore[union-attr]
    of.close()


def test_a_slow_disk_is_no_stuck_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = engine(tmp_path, keep_above=1, load_timeout_s=0.2)
    read = LayerReader.read

    def slow(reader: LayerReader, layer: int) -> Any:
        time.sleep(0.03)  # for three chunks and five layers: longer than the timeout
        return read(reader, layer)

    monkeypatch.setattr(LayerReader, "read", slow)
    found = ask(of, ASKED)
    assert found.completions[0].kv.reused_tokens > 0
    assert of.stats().chunks.load_timeouts == 0  # type: ignore[union-attr]
    of.close()


def test_a_request_may_end_while_it_waits_for_a_layer(tmp_path: Path, disk: Disk) -> None:
    of = engine(tmp_path, keep_above=1)
    begins_at_once(of)
    disk.stop(2)
    add_chunks(of)
    until = time.monotonic() + 30
    while not of.stats().chunks.begun_again and time.monotonic() < until:  # type: ignore[union-attr]
        of.step()
    of.cancel("chunks")
    assert [output.completions[0].finish_reason for output in of.step()] == ["cancelled"]
    assert not of.busy
    assert of._parts.memory.live_bytes == 0
    disk.gate.set()
    assert ask(of, ASKED).completions[0].kv.reused_tokens > 0
    assert [loads.n_bytes for loads in of._parts.file_loads] == [0]
    assert not of.config.chunk_store._files._rule._pins  # type: ignore[union-attr]
    of.close()


def test_a_choice_by_keys_of_the_second_layer_waits_for_it_in_the_queue(tmp_path: Path, disk: Disk) -> None:
    of = engine(tmp_path, keep_above=1)
    expected = ask(of, ASKED, pick="deviation", recompute=0.3)
    begins_at_once(of)
    disk.stop(1)
    add_chunks(of, pick="deviation", recompute=0.3)
    add(of, Request(request_id="plain", prompt=prompt(40), params=greedy(12, logprobs=0)))
    run_until(of, "plain")
    disk.gate.set()
    assert tokens(run_until(of, "chunks")["chunks"]) == tokens(expected)
    of.close()


def test_a_pass_waits_a_moment_for_layers_that_are_about_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = engine(tmp_path, keep_above=1)
    begins_at_once(of)
    monkeypatch.setattr(late, "WAIT_ALONE_S", 20.0)
    read = LayerReader.read

    def slow(reader: LayerReader, layer: int) -> Any:
        time.sleep(0.02)
        return read(reader, layer)

    monkeypatch.setattr(LayerReader, "read", slow)
    assert ask(of, ASKED).completions[0].kv.reused_tokens > 0
    assert of.stats().chunks.begun_again == 0  # type: ignore[union-attr]
    of.close()


def test_closing_does_not_wait_for_a_stuck_disk(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    of = engine(tmp_path, keep_above=1)
    monkeypatch.setattr(file_loader, "_CLOSE_S", 0.1)
    disk.stop(0)
    add_chunks(of)
    for _ in range(3):
        of.step()
    began = time.monotonic()
    of.close()
    assert time.monotonic() - began < STEP_S


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_timeout_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(OptionError, match=f"load_timeout_s={seconds} must be a number of seconds above 0"):
        ChunkStore(None, load_timeout_s=seconds)
