"""The store of turns: its limit, what a full disk does, removal, and readers while it writes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millpond.engine.sessions import folder as folder_module
from millpond.engine.sessions.store import SessionStore
from millpond.engine.sessions.stored_turn import StoredTurn
from tests.helpers.engine.sessions import ask, kv, open_engine, said, stored, words

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

KB = 1024


def turn(n: int, n_bytes: int = 4 * KB, seed: int = 0) -> StoredTurn:
    ids = np.random.default_rng(seed).integers(0, 1000, n)
    return StoredTurn(ids, {"0.keys": torch.zeros(n_bytes // 4)})


def longer(one: StoredTurn) -> np.ndarray:
    return np.append(one.ids, 1)


def found(store: SessionStore, ids: np.ndarray, salt: str | None = None, scope: str = "s") -> list[int]:
    scope = store.scope(scope)
    places = store.known(salt, scope, ids)
    return [place.length for place in places if store.read(place, ids[: place.length]) is not None]


def put(store: SessionStore, one: StoredTurn, salt: str | None = None, *, wait: bool = True) -> bool:
    taken = store.put(salt, store.scope("s"), one)
    assert not wait or store.wait(60)
    return taken


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*/*"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    made = SessionStore(tmp_path, disk=20 * KB)
    yield made
    made.close()


def test_the_longest_beginning_comes_first(store: SessionStore) -> None:
    whole = turn(30)
    for n in (10, 20, 30):
        put(store, StoredTurn(whole.ids[:n], turn(1, 100).tensors))
    put(store, turn(25, seed=1))
    assert found(store, longer(whole)) == [30, 20, 10]
    assert found(store, whole.ids) == [20, 10], "one token at least is read"
    assert found(store, longer(whole), salt="x") == found(store, longer(whole), scope="t") == []


def test_the_limit_holds_and_the_longest_unused_goes_first(store: SessionStore, tmp_path: Path) -> None:
    turns = [turn(10 + n, seed=n) for n in range(4)]
    for number, one in enumerate(turns):
        put(store, one)
        os.utime(max(stored(tmp_path), key=lambda path: path.stat().st_mtime_ns), (number, number))
    assert found(store, longer(turns[0])) == [10], "this is a use"
    put(store, turn(40, seed=9))
    assert [bool(found(store, longer(one))) for one in turns] == [True, False, True, True]
    assert disk_bytes(tmp_path) == store.stats().disk_bytes <= 20 * KB
    assert store.stats().evicted == 1


def test_one_that_is_larger_than_the_limit_is_not_stored_and_evicts_nothing(
    store: SessionStore, tmp_path: Path
) -> None:
    put(store, turn(10))
    assert not put(store, turn(11, 30 * KB, seed=1))
    assert not put(store, turn(12, 20 * KB - 100, seed=2)) or len(stored(tmp_path)) == 1, "with its header it is larger"
    assert found(store, longer(turn(10))) == [10]
    assert store.stats().evicted == 0


def test_no_moment_is_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen right after each file was written under its other name."""
    most, true = [0], folder_module.write_part

    def looked_at(path: Path, data: bytes) -> Path:
        part = true(path, data)
        most[0] = max(most[0], disk_bytes(tmp_path))
        return part

    monkeypatch.setattr(folder_module, "write_part", looked_at)
    stores = [SessionStore(tmp_path, disk=20 * KB) for _ in range(2)]
    for n in range(12):
        put(stores[n % 2], turn(10 + n, (3 + n % 5) * KB, seed=n), wait=n % 3 == 0)
    for one in stores:
        one.close()
    assert 15 * KB < most[0] <= 20 * KB
    assert disk_bytes(tmp_path) <= 20 * KB


def test_turns_are_read_while_they_wait(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    go, true = threading.Event(), folder_module.write_part

    def slow(path: Path, data: bytes) -> Path:
        assert go.wait(60)
        return true(path, data)

    monkeypatch.setattr(folder_module, "write_part", slow)
    first, second = turn(10), turn(20, seed=1)
    put(store, first, wait=False)
    put(store, second, wait=False)
    assert found(store, longer(first)) == [10]
    assert found(store, longer(second)) == [20]
    assert store.stats().waiting_bytes > 0
    (place,) = store.known(None, store.scope("s"), longer(first))
    read, again = (store.read(place, first.ids) for _ in range(2))
    assert read is not None
    assert again is not None
    read.tensors["0.keys"].fill_(9)  # who goes on from it changes nothing of what is written
    assert not again.tensors["0.keys"].any()
    assert store.remove(None) == 2, "removed while it waits: it never comes"
    assert found(store, longer(first)) == []
    go.set()
    assert store.wait(60)
    assert found(store, longer(first)) == found(store, longer(second)) == []


@pytest.mark.parametrize("n_tensors", [1, 300])
def test_a_turn_that_is_written_between_its_count_and_its_reading(tmp_path: Path, n_tensors: int) -> None:
    """Its file has a header, and is read all the same."""
    store, ids = SessionStore(tmp_path), np.arange(10)
    tensors = {f"{n}.positions_of_entries_behind": torch.zeros(1, 1, 1) for n in range(n_tensors)}
    one = StoredTurn(ids, tensors, forgotten=((1, 2), (4, 5)))
    with store._lock:  # it is not written yet
        put(store, one, wait=False)
        (place,) = store.known(None, store.scope("s"), longer(one))
        counted = store.size_of(place)
    assert store.wait(60)
    assert store.read(place, ids, counted) is not None
    assert store.size_of(place) <= counted
    store.close()


def test_too_many_that_wait_are_dropped_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, true = threading.Event(), folder_module.write_part

    def slow(path: Path, data: bytes) -> Path:
        assert go.wait(60)
        return true(path, data)

    store = SessionStore(tmp_path, disk=1000 * KB, waiting=10 * KB)
    monkeypatch.setattr(folder_module, "write_part", slow)
    assert [put(store, turn(10 + n, seed=n), wait=False) for n in range(4)] == [True, True, False, False]
    assert store.stats().dropped == 2
    go.set()
    assert store.wait(60)
    assert put(store, turn(12, seed=2)), "later there is room again"
    store.close()


def test_a_full_disk_stops_storing_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, true = open_engine(tmp_path), os.fsync

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ids = words(40, 0)
    ids += said(ask(engine, ids)) + words(5, 1)
    assert not list(tmp_path.glob("*/*/*")), "nothing is left of it"
    output = ask(engine, ids)
    assert kv(output).restored_tokens == 0
    (told,) = [one.getMessage() for one in caplog.records if one.name.startswith("millpond")]
    assert f"cannot be stored in {str(tmp_path)!r} ([Errno 28] No space left on device)" in told
    assert told.endswith("free space there, or start again with another folder"), "once, with the way out"
    assert engine.sessions is not None
    stats = engine.sessions.stats()
    assert (stats.stored, stats.write_failures > 0) == (0, True)
    monkeypatch.setattr(os, "fsync", true)
    ids += said(output) + words(5, 2)
    ask(engine, ids)
    assert len(stored(tmp_path)) == 1
    engine.close()


def test_a_turn_beyond_the_limit_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SessionStore(tmp_path, disk=KB)
    assert [put(store, turn(n)) for n in (40, 50)] == [False, False]
    assert store.stats().dropped == 2
    (told,) = [one.getMessage() for one in caplog.records]
    assert told.endswith("is larger than the limit of 1,024, and is not stored; raise cache_disk")
    store.close()


def test_what_cannot_be_made_bytes_is_lost_alone(store: SessionStore) -> None:
    bad: Any = {"0.keys": torch.zeros(4, device="meta")}
    put(store, StoredTurn(np.arange(5), bad))
    put(store, turn(10))
    assert found(store, longer(turn(10))) == [10]
    assert store.stats().write_failures == 1


def test_left_overs_of_a_killed_process_are_removed(store: SessionStore, tmp_path: Path) -> None:
    put(store, turn(10))
    (file,) = stored(tmp_path)
    left = file.with_name(f"{file.name}.00.part")
    left.write_bytes(b"x" * 15 * KB)
    SessionStore(tmp_path, disk=20 * KB).close()
    assert not left.exists()
    assert file.exists()


def test_a_lower_limit_holds_from_the_opening_on(store: SessionStore, tmp_path: Path) -> None:
    for n in range(3):
        put(store, turn(10 + n, seed=n))
    SessionStore(tmp_path, disk=6 * KB).close()
    assert len(stored(tmp_path)) == 1


def test_sessions_of_a_salt_are_listed_and_removed_alone(store: SessionStore) -> None:
    put(store, turn(10), "mine")
    put(store, turn(12, seed=1), "mine")
    put(store, turn(11), "other")
    mine = store.sessions("mine")
    assert sorted(one.n_tokens for one in mine) == [10, 12]
    assert all(one.nbytes > 4 * KB and one.last_used > 0 for one in mine)
    assert store.remove("other", mine[0].session_id) == 0
    assert store.remove("mine", mine[0].session_id) == 1
    assert [one.session_id for one in store.sessions("mine")] == [mine[1].session_id]
    assert store.remove("mine") == 1
    assert store.sessions("mine") == []
    assert len(store.sessions("other")) == 1


def test_neither_salts_nor_tokens_can_be_read_from_names(store: SessionStore, tmp_path: Path) -> None:
    put(store, turn(10), "a salt")
    other = SessionStore(tmp_path / "other", disk=20 * KB)
    put(other, turn(10), "a salt")
    names = [[*path.relative_to(root).parts] for root in (tmp_path, tmp_path / "other") for path in stored(root)]
    assert len(names) == 2
    assert not set(names[0]) & set(names[1]), "keyed by a secret of the folder"
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    other.close()


def test_a_folder_that_goes_away_fails_no_request(tmp_path: Path) -> None:
    home = tmp_path / "sessions"
    engine = open_engine(home)
    ids = words(40, 0)
    ids += said(ask(engine, ids)) + words(5, 1)
    home.rename(tmp_path / "gone")
    home.write_text("a file now")
    output = ask(engine, ids)
    assert kv(output).restored_tokens == 0
    assert engine.sessions is not None
    stats = engine.sessions.stats()
    assert stats.write_failures
    engine.close()
