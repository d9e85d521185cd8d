"""Files of chunks are read while their requests wait: others step on, and nothing that goes wrong fails a request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.cache.chunks.files import ChunkFiles
from millpond.cache.chunks.store import ChunkStore
from millpond.engine.chunks.reuse import ChunkReuse
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from tests.helpers.engine.helpers import add, greedy, prompt, tokens
from tests.helpers.engine.read_gate import ReadGate, read_gate
from tests.helpers.hf.families import shared_model

A, B, C = prompt(23), prompt(17), prompt(31)
QUESTION = prompt(6)
PLAIN = prompt(40)


def chunked(*parts: tuple[int, ...]) -> mp.Prompt:
    return mp.Prompt([*(mp.Chunk(part) for part in parts), QUESTION])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadGate]:
    with read_gate(monkeypatch, ChunkFiles, "millpond-chunks", "open_layers") as found:
        yield found


def engine(folder: Path, *, stored: bool = True, **options: Any) -> Engine:
    """An engine whose chunks A, B and C lie in files alone."""
    of = Engine(
        shared_model("llama"),
        method="full",
        max_step_tokens=16,
        page_slots=4,
        chunk_store=ChunkStore(folder, memory=1, **options),
    )
    if stored:
        for part in (A, B, C):
            run(of, name="store", asked=chunked(part))
    return of


def run(of: Engine, name: str, asked: Any, **options: Any) -> Any:
    add(of, request(name, asked, **options))
    (output,) = of.drain()
    return output


def request(name: str, asked: Any, new: int = 4, priority: int = 0, **options: Any) -> Request:
    cache = CacheOptions(**options)
    return Request(request_id=name, prompt=asked, params=greedy(new), cache=cache, priority=priority)


def steps(of: Engine, n: int) -> dict[str, Any]:
    """What ends within n steps."""
    done = {}
    for _ in range(n):
        done |= {output.request_id: output for output in of.step() if output.finished}
        of.check_integrity()
    return done


def rest(of: Engine) -> dict[str, Any]:
    done = {}
    while of.busy:
        done |= steps(of, 1)
    return done


def test_others_step_on_while_files_are_read(tmp_path: Path, gate: ReadGate) -> None:
    of = engine(tmp_path)
    add(of, request("chunks", chunked(A, B), recompute=0), request("plain", PLAIN))
    done = steps(of, 12)
    assert set(done) == {"plain"}, "it begins and ends meanwhile, of the same client and behind the other one"
    assert of.stats().waiting == 1
    gate.open.set()
    found = rest(of)["chunks"]
    assert found.completions[0].kv.reused_tokens == len(A) + len(B)
    assert found.error is None
    of.close()


def test_the_same_tokens_as_without_waiting(tmp_path: Path) -> None:
    of = engine(tmp_path)
    memory = Engine(
        shared_model("llama"), method="full", max_step_tokens=16, page_slots=4, chunk_store=ChunkStore(None)
    )
    for part in (A, B, C):
        run(memory, "store", chunked(part))
    for parts in ((B, A), (C, B, A)):
        one, other = (run(each, "x", chunked(*parts), recompute=0.3) for each in (of, memory))
        assert tokens(one) == tokens(other)
        assert one.completions[0].kv.reused_tokens == other.completions[0].kv.reused_tokens > 0
    assert [loads.n_bytes for loads in of._parts.file_loads] == [0]
    for each in (of, memory):
        each.close()


def test_a_request_that_is_cancelled_while_its_files_are_read(tmp_path: Path, gate: ReadGate) -> None:
    of = engine(tmp_path)
    add(of, request("gone", chunked(A, B)), request("behind", chunked(B, C)))
    steps(of, 1)
    assert gate.reached.wait(60)
    of.cancel("gone")
    assert steps(of, 1)["gone"].completions[0].finish_reason == "cancelled"
    gate.open.set()
    found = rest(of)["behind"]
    assert found.completions[0].kv.reused_tokens > 0
    assert [loads.n_bytes for loads in of._parts.file_loads] == [0]
    store = of.config.chunk_store
    assert not store._files._rule._pins, "nothing stays in use"
    of.close()


def test_an_engine_is_closed_while_files_are_read(tmp_path: Path, gate: ReadGate) -> None:
    of = engine(tmp_path)
    add(of, request("x", chunked(A, B)))
    steps(of, 1)
    assert gate.reached.wait(60)
    threading.Timer(0.05, gate.open.set).start()
    of.close()
    assert of.config.chunk_store._memory.rule._pins == {}


def test_a_failure_while_loading_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = engine(tmp_path)
    expected = run(of, "plain", A + B + QUESTION)

    def broken(*_: Any) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(ChunkReuse, "load", broken)
    found = run(of, "x", chunked(A, B))
    assert (found.error, tokens(found)) == (None, tokens(expected))
    assert of.stats().chunks is not None
    assert of.stats().chunks.load_failures == 1
    of.close()


def test_a_file_that_breaks_while_its_request_waits(tmp_path: Path, gate: ReadGate) -> None:
    of = engine(tmp_path)
    expected = run(of, "plain", A + B + QUESTION)
    add(of, request("x", chunked(A, B)))
    steps(of, 1)
    assert gate.reached.wait(60)
    for path in tmp_path.glob("??/*/*"):
        path.write_bytes(path.read_bytes()[:-3])
    gate.open.set()
    found = rest(of)["x"]
    assert (found.error, tokens(found)) == (None, tokens(expected))
    assert found.completions[0].kv.reused_tokens == 0
    assert of.stats().chunks is not None
    assert of.stats().chunks.torn == 2
    of.close()


def test_bytes_in_flight_are_bounded(tmp_path: Path) -> None:
    of = engine(tmp_path, loading=1)
    store = of.config.chunk_store
    most = store.size_of(len(A)) + store.size_of(len(C))
    names = [f"r{n}" for n in range(5)]
    add(of, *(request(name, chunked(*((A, C) if n % 2 else (C, A))), recompute=0) for n, name in enumerate(names)))
    done = {}
    while of.busy:
        done |= steps(of, 1)
        assert of._parts.file_loads[0].n_bytes <= most, "one request at a time, where each is larger than the bound"
    assert set(done) == set(names)
    assert all(one.completions[0].kv.reused_tokens > 0 for one in done.values())
    of.close()


def test_a_better_priority_takes_the_bytes_of_those_that_wait(tmp_path: Path) -> None:
    of = engine(tmp_path, loading=1)
    of._scheduler.max_running = 1
    add(of, request("runs", PLAIN, 40))
    steps(of, 4)
    add(of, request("last", chunked(A, B)))
    while not of._parts.file_loads[0]._loader.is_loaded("last"):
        steps(of, 1)
    add(of, request("first", chunked(C, A), priority=-1))
    order = list(rest(of))
    assert order.index("first") < order.index("last")
    of.close()
