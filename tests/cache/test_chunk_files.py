"""Files of a chunk store: what is cut, changed or foreign is counted and never read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from millpond.cache.chunks import files
from millpond.cache.chunks.file_format import seal_of
from millpond.cache.chunks.files import list_files
from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.variant import ChunkVariant, StoredShape, StoredVariant, VariantFacts, ids_key
from millpond.errors import OptionError

SHAPE = StoredShape("m" * 8, torch.float32, ((1, 2, 2),))


def variant(number: int = 0, prefix: str = "p", n: int = 2, *, exact: bool = True) -> ChunkVariant:
    facts = VariantFacts(ids_key([number]), n, ids_key([7]) if prefix == "p" else prefix, ("a",), (1.5,), 0.7, exact)
    keys, values = torch.full((1, n, 2), float(number)), torch.arange(2.0 * n).view(1, n, 2)
    return ChunkVariant(facts, torch.ones(n), (keys,), (values,))


def opened(folder: Path, **options: Any) -> ChunkStore:
    """A store that holds nothing in memory."""
    store = ChunkStore(folder, **({"memory": 1} | options))
    store.bind(SHAPE)
    return store


def file_of(folder: Path) -> Path:
    (found,) = folder.glob("??/*/*.safetensors")
    return found


def taken(store: ChunkStore, key: str) -> list[StoredVariant]:
    return [found for facts in store.find(key) if (found := store.take(facts, 0.5)) is not None]


def same(one: StoredVariant, other: ChunkVariant) -> bool:
    pairs = zip((one.scores, one.keys(0), one.values(0)), (other.scores, *other.keys, *other.values), strict=True)
    return one.facts == other.facts and all(torch.equal(a, b) for a, b in pairs)


def test_what_is_written_is_read_by_another_store(tmp_path: Path) -> None:
    opened(tmp_path).put(variant())
    store = opened(tmp_path)
    (found,) = taken(store, variant().facts.chunk)
    assert same(found, variant())
    assert store.stats().disk_hits == 1
    assert store.stats().disk_bytes == file_of(tmp_path).stat().st_size
    assert not list(tmp_path.rglob("*.part"))


def test_every_byte_flipped_and_every_cut(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(variant())
    path = file_of(tmp_path)
    data = path.read_bytes()
    broken = [data[:i] + bytes([data[i] ^ 0x15]) + data[i + 1 :] for i in range(len(data))]
    broken += [data[:n] for n in range(0, len(data), 7)] + [data + b"\0"]
    unharmed = 0
    for content in broken:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        found = taken(store, variant().facts.chunk)
        assert all(same(one, variant()) for one in found)  # a changed blank of the header harms nothing
        unharmed += len(found)
    stats = store.stats()
    assert unharmed + stats.torn + stats.foreign == len(broken)
    assert unharmed < 16


def test_files_of_others_are_removed_and_counted(tmp_path: Path) -> None:
    other = ChunkStore(tmp_path / "other", memory=1)
    other.bind(replace(SHAPE, model="another"))
    other.put(variant())
    store = opened(tmp_path / "own")
    store.put(variant())
    shutil.copy(file_of(tmp_path / "other"), file_of(tmp_path / "own"))
    assert taken(store, variant().facts.chunk) == []
    assert store.stats().foreign == 1
    assert not list((tmp_path / "own").glob("??/*/*"))


def test_a_file_of_another_chunk_or_dtype_is_foreign(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(variant(1))
    path = file_of(tmp_path)
    key = variant(2).facts.chunk
    (tmp_path / key[:2] / key).mkdir(parents=True)
    shutil.copy(path, tmp_path / key[:2] / key / path.name)
    assert taken(store, key) == []
    assert store.stats().foreign == 1
    half = ChunkStore(tmp_path, memory=1)
    half.bind(replace(SHAPE, dtype=torch.float16))
    assert taken(half, variant(1).facts.chunk) == []
    assert half.stats().foreign == 1


@pytest.mark.parametrize(
    "change",
    [{"n_tokens": "2"}, {"n_tokens": 2.0}, {"before": "a"}, {"received": [None]}, {"impact": []}, {"other": 1}],
    ids=str,
)
def test_sealed_facts_of_another_form_are_foreign(tmp_path: Path, change: dict[str, Any]) -> None:
    store = opened(tmp_path)
    store.put(variant())
    path = file_of(tmp_path)
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
    about["facts"] |= change
    text = json.dumps(about)
    path.write_bytes(save(tensors, {"about": text, "seal": seal_of(text)}))
    assert taken(store, variant().facts.chunk) == []
    assert store.stats().foreign == 1


def test_a_file_that_is_no_chunk_is_torn(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(variant())
    for content in (b"", b"PK", b"\x08\0\0\0\0\0\0\0{}      ", b"\xff" * 64):
        file = tmp_path / variant().facts.chunk[:2] / variant().facts.chunk / "x.safetensors"
        file.write_bytes(content)
        assert len(taken(store, variant().facts.chunk)) == 1
    assert store.stats().torn == 4


def test_a_full_disk_stops_storing_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, memory="1MiB")

    def full(descriptor: int) -> None:
        os.truncate(descriptor, 100)
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    store.put(variant())
    assert store.stats().write_failures == 1
    assert len(taken(store, variant().facts.chunk)) == 1, "memory has it"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "store.json"]


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    store.put(variant())
    (facts,) = store.find(variant().facts.chunk)
    shutil.rmtree(tmp_path / "store")
    assert store.take(facts, 0.5) is None
    assert store.find(facts.chunk) == []
    assert store.stats().read_failures == 1
    store.put(variant(3))  # which makes it again
    assert len(taken(store, variant(3).facts.chunk)) == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("a file stands where the folder was")
    store.put(variant())
    assert store.find(variant().facts.chunk) == []
    assert store.stats().write_failures == 1
    with pytest.raises(OptionError, match="chunks cannot be stored in"):
        opened(tmp_path / "store")


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    one.put(variant(1))
    assert len(taken(other, variant(1).facts.chunk)) == 1
    other.put(variant(1))  # the same again changes nothing
    assert other.stats().stored == 0
    (facts,) = one.find(variant(1).facts.chunk)
    shutil.rmtree(file_of(tmp_path).parent)
    assert one.take(facts, 0.5) is None


def test_left_overs_of_a_killed_process_go(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(variant())
    part = file_of(tmp_path).with_name("x.safetensors.0123.part")
    part.write_bytes(b"half")
    assert [f.name for f in opened(tmp_path).find(variant().facts.chunk)] == [variant().facts.name]
    assert part.exists(), "another process may be writing it"
    old = time.time() - 2 * files.LEFT_OVER_S
    os.utime(part, (old, old))
    opened(tmp_path)
    assert not part.exists()


def test_a_store_of_another_model_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    other = ChunkStore(tmp_path)
    with pytest.raises(OptionError, match="holds chunks of another model"):
        other.bind(replace(SHAPE, model="another"))
    store = ChunkStore(None)
    store.bind(SHAPE)
    with pytest.raises(OptionError, match="in use with another model"):
        store.bind(replace(SHAPE, model="another"))


def test_a_torn_name_of_the_model_is_written_again(tmp_path: Path) -> None:
    opened(tmp_path).put(variant())
    (tmp_path / "store.json").write_text('{"mark"')
    assert len(taken(opened(tmp_path), variant().facts.chunk)) == 1
    assert json.loads((tmp_path / "store.json").read_text())["mark"] == SHAPE.mark


def test_check_names_the_bad_files(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(3):
        store.put(variant(number))
    assert [one.facts is None for one in list_files(tmp_path, verify=True)] == [False] * 3
    bad = sorted(tmp_path.glob("??/*/*.safetensors"))[1]
    bad.write_bytes(bad.read_bytes()[:-1] + b"!")
    assert all(one.facts for one in list_files(tmp_path)), "headers alone"
    (found,) = [one for one in list_files(tmp_path, verify=True) if one.facts is None]
    assert found.path == bad
    assert "is not as it was written" in found.why
    with pytest.raises(OptionError, match="is no chunk store"):
        list_files(tmp_path / "elsewhere")
    assert bad.exists(), "a check removes nothing"


def test_the_disk_limit_lets_the_longest_unused_go(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(variant(0))
    size = file_of(tmp_path).stat().st_size
    store = opened(tmp_path, disk=3 * size)
    for number in range(1, 5):
        store.put(variant(number))
        for place, path in enumerate(sorted(tmp_path.glob("??/*/*.safetensors"), key=lambda p: p.stat().st_mtime_ns)):
            os.utime(path, (1000 + place, 1000 + place))  # in this order, however coarse the clock of the disk is
    assert len(list(tmp_path.glob("??/*/*.safetensors"))) <= 3
    assert taken(store, variant(0).facts.chunk) == []
    assert len(taken(store, variant(4).facts.chunk)) == 1
    assert store.stats().disk_evicted >= 2


def test_the_memory_limit() -> None:
    store = ChunkStore(None, memory=2 * variant().stored(SHAPE).nbytes)
    store.bind(SHAPE)
    for number in range(3):
        store.put(variant(number))
        taken(store, variant(0).facts.chunk)  # which is used
    held = [len(taken(store, variant(number).facts.chunk)) for number in range(3)]
    assert held == [1, 0, 1]
    assert store.stats().memory_evicted == 1
    assert store.stats().memory_bytes == 2 * variant().stored(SHAPE).nbytes


def test_the_least_useful_variant_goes() -> None:
    store = ChunkStore(None, variants=2)
    store.bind(SHAPE)
    for prefix in ("1" * 64, "2" * 64):
        store.put(variant(0, prefix))
    first = next(one for one in store.find(variant().facts.chunk) if one.prefix[0] == "1")
    store.take(first, 0.1)
    store.put(variant(0, "3" * 64))
    assert {one.prefix[0] for one in store.find(first.chunk)} == {"1", "3"}


def test_an_exact_variant_takes_the_place_of_a_blended_one() -> None:
    store = ChunkStore(None)
    store.bind(SHAPE)
    for exact in (False, False, True, False):
        store.put(variant(exact=exact))
    assert {one.exact for one in store.find(variant().facts.chunk)} >= {True}
    assert store.stats().stored == 2


def test_sizes_and_settings_out_of_range(tmp_path: Path) -> None:
    store = opened(tmp_path, memory=100, disk=200)
    store.check_size(10)
    with pytest.raises(OptionError, match=r"a chunk of 100 tokens takes 2,000 bytes and the chunk store holds 200"):
        store.check_size(100)
    with pytest.raises(OptionError, match="variants=0"):
        ChunkStore(None, variants=0)
    with pytest.raises(OptionError, match="alpha=0"):
        ChunkStore(None, alpha=0)


# ---------------------------------------------------------------------- several processes


def in_child(work: Callable[[], None]) -> int:
    """The id of a process that does some work and ends."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def test_a_process_that_is_killed_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    store.put(variant(1))
    reached, tell = os.pipe()
    real = files.write_part

    def half(path: Path, data: bytes) -> Path:
        part = real(path, data[: len(data) // 2])
        os.write(tell, b"x")
        signal.pause()
        return part

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_part", half)
        child = in_child(lambda: store.put(variant(2)))
    assert os.read(reached, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (part,) = tmp_path.rglob("*.part")
    after = opened(tmp_path)
    assert taken(after, variant(2).facts.chunk) == []
    assert len(taken(after, variant(1).facts.chunk)) == 1
    assert [one.facts is None for one in list_files(tmp_path, verify=True)] == [False], "a check does not see it"
    after.put(variant(2))
    assert len(taken(opened(tmp_path), variant(2).facts.chunk)) == 1
    stats = after.stats()
    assert (stats.torn, stats.foreign, stats.read_failures, stats.write_failures) == (0, 0, 0, 0)
    old = time.time() - 2 * files.LEFT_OVER_S
    os.utime(part, (old, old))
    opened(tmp_path)
    assert not part.exists()
    for end in (reached, tell):
        os.close(end)


def test_two_processes_write_read_and_evict_in_one_folder(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.put(variant(0))
    size = file_of(tmp_path).stat().st_size
    stores = [opened(tmp_path, disk=5 * size) for _ in range(2)]

    def work(store: ChunkStore) -> bool:
        """Whether all that is found is as it was written."""
        good = True
        for number in [n % 9 for n in range(90)]:
            found = taken(store, variant(number).facts.chunk)
            good = good and all(same(one, variant(number)) for one in found)
            if not found:
                store.put(variant(number))
        stats = store.stats()
        return good and (stats.torn, stats.foreign, stats.write_failures) == (0, 0, 0)

    def child_work() -> None:
        os._exit(0 if work(stores[0]) else 3)

    child = in_child(child_work)
    assert work(stores[1])
    assert os.waitpid(child, 0)[1] == 0
    last = opened(tmp_path, disk=5 * size)
    for number in (20, 21):
        last.put(variant(number))
    assert last.stats().disk_bytes <= 5 * size
    assert sum(path.stat().st_size for path in tmp_path.glob("??/*/*.safetensors")) <= 5 * size
    assert all(one.facts for one in list_files(tmp_path, verify=True))


def test_check_names_each_kind_of_bad_file(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(5):
        store.put(variant(number))
    paths = sorted(tmp_path.glob("??/*/*.safetensors"))
    data = paths[0].read_bytes()
    paths[0].write_bytes(data[:40])  # cut
    paths[1].write_bytes(paths[1].read_bytes()[:-1] + b"!")  # changed
    paths[2].write_bytes(data)  # of another chunk
    other = ChunkStore(tmp_path / "other", memory=1)
    other.bind(replace(SHAPE, model="another"))
    other.put(variant(7))
    shutil.copy(file_of(tmp_path / "other"), paths[3])
    shutil.rmtree(tmp_path / "other")
    found = {one.path: one.why for one in list_files(tmp_path, verify=True) if one.facts is None}
    assert set(found) == set(paths[:4])
    words = ("is cut", "is not as it was written", "another chunk", "another model")
    assert all(word in found[path] for path, word in zip(paths[:4], words, strict=True)), found
