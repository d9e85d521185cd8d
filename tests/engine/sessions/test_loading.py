"""Files of turns are read while their requests wait: others step on, and nothing that goes wrong fails a request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.sessions.folder import SessionFolder, SessionStats
from millpond.engine.sessions.store import SessionStore
from millpond.engine.sessions.stored_turn import StoredTurn
from tests.helpers.engine.read_gate import ReadGate, read_gate
from tests.helpers.engine.sessions import NEW, ask, kv, open_engine, said, stored, words

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadGate]:
    with read_gate(monkeypatch, SessionFolder, "millpond-turns") as found:
        yield found


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[tuple[Engine, list[list[int]]]]:
    """An engine that has stored turns of three conversations, and their next prompts."""
    engine = open_engine(tmp_path)
    texts = [words(60 + 4 * n, n) for n in range(3)]
    texts = [ids + said(ask(engine, ids)) + words(9, 10 + n) for n, ids in enumerate(texts)]
    yield engine, texts
    engine.close()


def request(name: str, ids: list[int], new: int = NEW, priority: int = 0) -> Request:
    params = mp.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    return Request(request_id=name, prompt=tuple(ids), params=params, priority=priority)


def steps(engine: Engine, n: int) -> dict[str, Any]:
    """What ends within n steps."""
    done = {}
    for _ in range(n):
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
    return done


def rest(engine: Engine) -> dict[str, Any]:
    done = {}
    while engine.busy:
        done |= steps(engine, 1)
    return done


def in_flight(engine: Engine) -> int:
    assert engine._parts.sessions is not None
    return engine._parts.sessions.loads.n_bytes


def test_others_step_on_while_a_turn_is_read(begun: tuple[Engine, list[list[int]]], gate: ReadGate) -> None:
    engine, texts = begun
    engine.add(request("turn", texts[0]))
    engine.step()
    assert gate.reached.wait(60)
    engine.add(request("plain", words(40, 99)))
    done: dict[str, Any] = {}
    while not done:
        done |= steps(engine, 1)
    assert set(done) == {"plain"}, "it finds no turn, so that it reads no file"
    assert engine.stats().waiting == 1
    gate.open.set()
    found = rest(engine)["turn"]
    assert kv(found).restored_tokens == len(texts[0]) - 10
    assert in_flight(engine) == 0


def test_a_request_that_is_cancelled_while_its_turn_is_read(
    begun: tuple[Engine, list[list[int]]], gate: ReadGate
) -> None:
    engine, texts = begun
    engine.add(request("gone", texts[0]))
    engine.add(request("behind", texts[1]))
    steps(engine, 1)
    assert gate.reached.wait(60)
    engine.cancel("gone")
    assert steps(engine, 1)["gone"].completions[0].finish_reason == "cancelled"
    gate.open.set()
    assert kv(rest(engine)["behind"]).restored_tokens == len(texts[1]) - 10
    assert in_flight(engine) == 0
    assert kv(ask(engine, texts[0])).restored_tokens == len(texts[0]) - 10, "and its turn is as it was"


def test_a_request_that_is_cancelled_before_it_begins(begun: tuple[Engine, list[list[int]]]) -> None:
    engine, texts = begun
    engine._scheduler.max_running = 1
    engine.add(request("runs", words(40, 99), 12))
    steps(engine, 3)
    engine.add(request("waits", texts[0]))
    while not in_flight(engine):
        steps(engine, 1)
    engine.cancel("waits")
    assert in_flight(engine) == 0
    rest(engine)


def test_an_engine_is_closed_while_a_turn_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gate = open_engine(tmp_path), ReadGate("millpond-turns")
    ids = words(60, 0)
    ids += said(ask(engine, ids)) + words(9, 1)
    monkeypatch.setattr(SessionFolder, "read", gate(SessionFolder.read))
    engine.add(request("turn", ids))
    steps(engine, 1)
    assert gate.reached.wait(60)
    threading.Timer(0.05, gate.open.set).start()
    engine.close()
    assert in_flight(engine) == 0


@pytest.mark.parametrize("name", ["known", "read"])
def test_a_mistake_while_loading_is_a_miss(
    name: str, begun: tuple[Engine, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, texts = begun

    def broken(*_: Any) -> None:
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(SessionStore, name, broken)
        output = ask(engine, texts[0])
    assert kv(output).restored_tokens == 0
    stats = engine.stats().sessions
    assert stats is not None
    assert stats.read_failures == 1
    assert kv(ask(engine, [*texts[0], 5])).restored_tokens > 0, "the next is not poisoned"


def changed_while_waiting(
    engine: Engine, ids: list[int], gate: ReadGate, folder: Path, change: Callable[[bytes], bytes]
) -> SessionStats:
    """The sessions' figures after a request whose files were changed between their count and their reading."""
    engine.add(request("turn", ids))
    steps(engine, 1)
    assert gate.reached.wait(60)
    for path in stored(folder):
        path.write_bytes(change(path.read_bytes()))
    gate.open.set()
    output = rest(engine)["turn"]
    assert (output.error, kv(output).restored_tokens) == (None, 0)
    stats = engine.stats().sessions
    assert stats is not None
    return stats


def test_a_file_that_breaks_while_its_request_waits(
    begun: tuple[Engine, list[list[int]]], gate: ReadGate, tmp_path: Path
) -> None:
    engine, texts = begun
    stats = changed_while_waiting(engine, texts[0], gate, tmp_path, lambda data: data[:-3])
    assert (stats.torn, stats.misses) == (1, 4)


def test_a_file_that_grows_while_its_request_waits_is_not_read(
    begun: tuple[Engine, list[list[int]]], gate: ReadGate, tmp_path: Path
) -> None:
    """Its bytes were counted before."""
    engine, texts = begun
    stats = changed_while_waiting(engine, texts[0], gate, tmp_path, lambda data: data + bytes(1 << 20))
    assert stats.torn == 0, "else it was read, and seen to be no turn"


def test_bytes_in_flight_are_bounded(tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    texts = [words(60 + 4 * n, n) for n in range(5)]
    texts = [ids + said(ask(engine, ids)) + words(9, 10 + n) for n, ids in enumerate(texts)]
    engine.close()
    most = max(path.stat().st_size for path in stored(tmp_path))
    engine = open_engine(tmp_path)
    assert engine._parts.sessions is not None
    engine._parts.sessions.loads._loader._limit = 1
    for n, ids in enumerate(texts):
        engine.add(request(str(n), ids))
    done: dict[str, Any] = {}
    while engine.busy:
        done |= steps(engine, 1)
        assert in_flight(engine) <= most, "one at a time, where each is larger than the bound"
    assert [kv(done[str(n)]).restored_tokens for n in range(5)] == [len(ids) - 10 for ids in texts]
    engine.close()


def test_the_best_priority_is_not_held_up_by_turns_that_wait(begun: tuple[Engine, list[list[int]]]) -> None:
    engine, texts = begun
    assert engine._parts.sessions is not None
    loader = engine._parts.sessions.loads._loader
    loader._limit, engine._scheduler.max_running = 1, 1
    engine.add(request("runs", words(40, 99), 40))
    steps(engine, 4)
    engine.add(request("last", texts[0]))
    while not loader.is_loaded("last"):
        steps(engine, 1)
    engine.add(request("first", texts[1], priority=-1))
    order = rest(engine)
    assert list(order).index("first") < list(order).index("last")
    assert all(kv(order[name]).restored_tokens for name in ("first", "last"))


def test_a_turn_is_checked_outside_the_step(
    begun: tuple[Engine, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, texts = begun
    names, true = [], StoredTurn.from_bytes

    def noted(*args: Any) -> StoredTurn:
        names.append(threading.current_thread().name)
        return true(*args)

    monkeypatch.setattr(StoredTurn, "from_bytes", noted)
    assert kv(ask(engine, texts[0])).restored_tokens
    assert names == ["millpond-turns"]
