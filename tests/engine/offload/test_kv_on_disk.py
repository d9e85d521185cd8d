"""KV on a disk gives the tokens of KV in memory, whatever the placement, schedule, method and codec."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.cache.tiered.extents import RunTable
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.open import Opened, open_in_memory
from millpond.engine.offload.plan import Plan
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.errors import DataError, OptionError
from millpond.tiers.buffers import aligned_buffer
from millpond.tiers.files import ScratchFile
from millpond.tiers.threads import ThreadBackend
from tests.engine.test_offload import (
    CODECS,
    FAMILIES,
    LENGTHS,
    METHODS,
    N_LAYERS,
    answers,
    in_memory,
    model,
    options,
    prompt,
)
from tests.helpers.tiers.backends import FaultyScratch, ShuffledBackend
from tests.helpers.tiers.page_cache import cached_bytes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MEMORY = "12MiB"
WEIGHTS = [{"host": 1.0}, {"disk": 1.0}]
KV = [{"disk": 1.0}, {"host": 0.4, "disk": 0.6}]
#: Schedule and micro-batch; of nine sequences "all" are sixteen.
ORDERS = [("row", 1), ("row", 4), ("zigzag", 1), ("zigzag", 4), ("zigzag", 16), ("row", 16)]


def opened(folder: Path, plan: Plan, config: dict[str, Any], memory: str | None = MEMORY, **more: Any) -> Opened:
    return open_in_memory(folder, memory, plan, None, EngineConfig(**config), **more)


def engine_of(found: Opened) -> Engine:
    return Engine(found.model, None, found.config, streamed=found.streamed, tier=found.tier)


def plan_of(weights: dict[str, float], kv: dict[str, float], order: tuple[Any, int]) -> Plan:
    return Plan(weights=weights, kv=kv, schedule=order[0], micro_batch=order[1], slots=2, prompt_rows=256)


def check(folder: Path, name: str, method: str, codec: str, plan: Plan, **more: Any) -> Opened:
    found = opened(folder, plan, options(method, codec, name), **more)
    engine = engine_of(found)
    tokens = answers(engine)
    assert tokens == in_memory(name, method, codec)
    assert len(set(tokens)) > 5, "answers differ, so that mixed-up requests would be seen"
    assert found.ledger.peak("host") <= mp.Budget.parse(MEMORY).amount
    assert found.tier is not None
    assert found.tier.bytes_read > 0
    assert found.tier.bytes_used == 0, "all requests have ended"
    engine.check_integrity()
    engine.close()
    assert found.ledger.by_purpose("disk").get("kv") is None
    return found


#: The rest is in test_placements. Each family with half of the methods, and in turns each codec, placement and order.
SOME = [
    (name, METHODS[m], CODECS[(n + m) % 3], WEIGHTS[(n + m) % 2], KV[(n + m // 2) % 2], ORDERS[(2 * n + m) % 6])
    for n, name in enumerate(FAMILIES)
    for m in range(n % 2, 6, 2)
]


@pytest.mark.covering
@pytest.mark.parametrize(("name", "method", "codec", "weights", "kv", "order"), SOME)
def test_tokens_are_those_of_the_model_in_memory(
    name: str, method: str, codec: str, weights: Any, kv: Any, order: Any, folders: dict[str, Path]
) -> None:
    check(folders[name], name, method, codec, plan_of(weights, kv, order))


@pytest.mark.parametrize(("seed", "overlap"), [(0, True), (1, True), (2, False)])
def test_delays_and_order_of_reads_and_writes_change_nothing(
    seed: int, overlap: bool, folders: dict[str, Path]
) -> None:
    backend = ShuffledBackend(seed, most_s=0.001)
    plan = plan_of({"host": 1.0}, {"disk": 1.0}, ("zigzag", 4))
    check(folders["llama"], "llama", "h2o", "auto", plan, tiered={"backend": backend, "overlap": overlap})


def test_h2o_keeps_the_same_entries_and_writes_little(tmp_path: Path) -> None:
    """Entries and scores of every layer are those in memory after each of 200 steps; a sixteenth is written of what is
    read."""
    tier = DiskTier(tmp_path, range(N_LAYERS))
    engines = [Engine(model("llama"), method="h2o", budget=48, tier=one) for one in (None, tier)]
    params = mp.SamplingParams(max_tokens=202, temperature=0, ignore_eos=True)
    assert engines[0].context_length >= 50 + 202
    for engine in engines:
        engine.add(Request(request_id="a", prompt=prompt(50), params=params))
        engine.step()
    read, written = tier.bytes_read, tier.bytes_written
    for _ in range(200):
        for engine in engines:
            engine.step()
        for layer in range(N_LAYERS):
            assert engines[0].memory("a", layer) == engines[1].memory("a", layer)
    assert 16 * (tier.bytes_written - written) <= tier.bytes_read - read
    assert tier.bytes_read - read > 200 * N_LAYERS * 4096, "all layers were read in each step"
    outputs = [engine.drain()[-1].completions[0].token_ids for engine in engines]
    assert outputs[0] == outputs[1]
    for engine in engines:
        engine.close()


def test_pages_of_prompts_are_on_their_way_before_their_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps that read a prompt and decode too: when a layer begins to decode, pages of the prompt already come."""
    tier = DiskTier(tmp_path, range(N_LAYERS))
    engine = Engine(model("llama"), method="h2o", budget=48, max_step_tokens=32, tier=tier)
    bring, seen = DiskTier._bring, list[tuple[int, int]]()

    def watched(self: DiskTier, layer_cache: Any, *rest: Any) -> Any:
        if layer_cache.table is not None and layer_cache.table.is_offloaded:
            seen.append((layer_cache.index, sum(one.index == layer_cache.index for one in self._coming)))
        return bring(self, layer_cache, *rest)

    params = mp.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    engine.add(Request(request_id="a", prompt=prompt(20), params=params))
    engine.step()
    engine.add(Request(request_id="b", prompt=prompt(110), params=params))
    engine.step()
    monkeypatch.setattr(DiskTier, "_bring", watched)
    engine.step()
    assert [index for index, _ in seen] == [index for index in range(N_LAYERS) for _ in "ab"], "both, in each layer"
    assert [n for index, n in seen if index] == [2, 1] * (N_LAYERS - 1), "with itself"
    engine.drain()
    engine.close()


def test_a_full_cache_is_written_once(tmp_path: Path) -> None:
    """Pages that were written are not written again: what is written is what is stored, in whole blocks of 4 KiB."""
    tier = DiskTier(tmp_path, range(N_LAYERS))
    engine = Engine(model("llama"), method="full", tier=tier)
    engine.add(Request(request_id="a", prompt=prompt(150), params=mp.SamplingParams(max_tokens=90, ignore_eos=True)))
    for _ in range(85):
        engine.step()
    pages = (150 + 84) // engine.config.page_slots
    shape = engine._model.layers[0]
    page = engine.config.page_slots * 4 * (shape.key_dim + shape.value_dim) * shape.n_kv_heads
    assert tier.bytes_used == tier.bytes_written
    assert pages * page * N_LAYERS <= tier.bytes_written <= (pages * page + 4 * 4096) * N_LAYERS
    engine.close()


@pytest.mark.parametrize("method", ["full", "h2o", "snapkv"])
def test_several_answers_of_a_prompt_share_its_pages(method: str, tmp_path: Path) -> None:
    found = []
    for tier in (None, DiskTier(tmp_path, range(1, N_LAYERS), micro_batch=2)):
        engine = Engine(model("llama"), **options(method), tier=tier)
        for length in (64, 111):
            params = mp.SamplingParams(max_tokens=40, n=3, temperature=1.0, seed=length, ignore_eos=True)
            engine.add(Request(request_id=str(length), prompt=prompt(length), params=params))
        outputs = sorted(engine.drain(), key=lambda out: out.request_id)
        engine.check_integrity()
        found.append([answer.token_ids for out in outputs for answer in out.completions])
        engine.close()
    assert found[0] == found[1]
    assert len(set(found[0])) == 6


@pytest.mark.covering
@pytest.mark.parametrize("to_files", [False, True])
@pytest.mark.parametrize("method", ["full", "h2o"])
def test_requests_that_are_preempted_go_on(method: str, to_files: bool, tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, range(0, N_LAYERS, 2))
    swap_to = {"swap_to": tmp_path} if to_files else {}
    memory = "700KiB" if method == "h2o" else "1500KiB"
    engine = Engine(model("llama"), **options(method), tier=tier, kv_memory=memory, overcommit=4.0, **swap_to)
    assert answers(engine, 40) == in_memory_of(method, 40)
    assert engine.stats().preemptions > 0
    engine.check_integrity()
    engine.close()


@cache
def in_memory_of(method: str, new: int) -> list[Any]:
    engine = Engine(model("llama"), **options(method))
    try:
        return answers(engine, new)
    finally:
        engine.close()


# ---------------------------------------------------------------------- faults


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[tuple[Engine, DiskTier]]:
    FaultyScratch.full = None
    tier = DiskTier(tmp_path, range(N_LAYERS), open_file=FaultyScratch, backend=ThreadBackend(1))
    engine = Engine(model("llama"), **options("full"), tier=tier)
    yield engine, tier
    FaultyScratch.full = None
    engine.close()


def begun(engine: Engine) -> list[RequestOutput]:
    """All prompts are read, and the first answers have a few tokens; returns what has ended already."""
    params = mp.SamplingParams(max_tokens=10, temperature=0)
    for length in LENGTHS:
        engine.add(Request(request_id=str(length), prompt=prompt(length), params=params))
    return [out for _ in range(8) for out in engine.step() if out.finished]


def after_a_fault(engine: Engine, *before: RequestOutput) -> dict[str, RequestOutput]:
    """Outputs by name; those without an error have the tokens of KV in memory, and so have later ones."""
    found = {out.request_id: out for out in [*before, *engine.drain()] if out.finished}
    assert set(found) == set(map(str, LENGTHS)), "each request ends once, one way or the other"
    expected = dict(zip(map(str, LENGTHS), in_memory("llama", "full"), strict=True))
    for name, out in found.items():
        if out.error is None:
            assert out.completions[0].token_ids == expected[name]
        else:
            assert out.completions[0].token_ids == expected[name][: len(out.completions[0].token_ids)]
    engine.check_integrity()
    for extents in engine._parts.disk_tier._extents.values():  # type: ignore[union-attr]
        file: Any = extents._file
        file.bad, file.flipped = set(), set()
    assert answers(engine) == in_memory("llama", "full")
    return found


def a_run(tier: DiskTier, layer: int = 2) -> tuple[FaultyScratch, RunTable, int]:
    """The file of a layer, its runs, and the number of the longest of them."""
    file: Any = tier._extents[layer]._file
    runs = tier._extents[layer].runs
    return file, runs, int(runs.nbytes.argmax())


def test_what_cannot_be_read_ends_its_request_alone(faulty: tuple[Engine, DiskTier]) -> None:
    engine, tier = faulty
    ended = begun(engine)
    file, runs, run = a_run(tier)
    offset = int(runs.offset[run])
    file.bad.add(offset)
    found = after_a_fault(engine, *ended)
    errors = {name: out.error for name, out in found.items() if out.error is not None}
    assert list(errors) == ["230"]
    assert isinstance(errors["230"], DataError)
    for part in (f"at offset {offset:,}", "bytes wanted", "read in each of 2 tries", "Input/output error"):
        assert part in str(errors["230"])


def test_a_flipped_byte_is_noticed(faulty: tuple[Engine, DiskTier]) -> None:
    engine, tier = faulty
    ended = begun(engine)
    file, runs, run = a_run(tier)
    file.flipped.add(int(runs.offset[run] + runs.needed[run] // 2))
    found = after_a_fault(engine, *ended)
    (error,) = [out.error for out in found.values() if out.error is not None]
    assert "are not those that were written" in str(error)


def test_an_earlier_generation_is_noticed(faulty: tuple[Engine, DiskTier]) -> None:
    """Whole bytes that an earlier run wrote to the same place are refused."""
    engine, tier = faulty
    ended = begun(engine)
    file, runs, run = a_run(tier)
    nbytes, needed, generation = int(runs.nbytes[run]), int(runs.needed[run]), int(runs.generation[run])
    earlier = aligned_buffer(nbytes)
    assert file.read_into(int(runs.offset[run]), memoryview(earlier.numpy())) == nbytes
    # as if it had been written once more, and the disk had not done it
    runs.checksum[run] = zlib.crc32(earlier.numpy().data[:needed], generation + 1)
    found = after_a_fault(engine, *ended)
    (error,) = [out.error for out in found.values() if out.error is not None]
    assert f"of generation {generation}" in str(error)


@pytest.mark.parametrize(("times", "ends"), [(1, 0), (2, 1)])
def test_a_write_that_fails_is_made_once_more(times: int, ends: int, faulty: tuple[Engine, DiskTier]) -> None:
    engine, tier = faulty
    file: Any = tier._extents[3]._file
    file.fails = [OSError(errno.ENOSPC, "No space left on device") for _ in range(times)]
    found = after_a_fault(engine, *begun(engine))
    assert sum(out.error is not None for out in found.values()) <= ends
    failed = [out.error for out in found.values() if out.error is not None]
    assert len(failed) == ends
    for part in ("No space left on device", "written in each of 2 tries"):
        assert all(part in str(error) for error in failed)


def test_a_full_disk_ends_the_requests_that_find_no_room(faulty: tuple[Engine, DiskTier]) -> None:
    engine, _ = faulty
    FaultyScratch.full = 600 << 10
    params = mp.SamplingParams(max_tokens=10, temperature=0)
    for length in LENGTHS:
        engine.add(Request(request_id=str(length), prompt=prompt(length), params=params))
    outputs = {out.request_id: out for out in engine.drain() if out.finished}
    FaultyScratch.full = None
    errors = [out.error for out in outputs.values() if out.error is not None]
    assert 0 < len(errors) < len(LENGTHS)
    assert all("more bytes for KV are wanted" in str(error) for error in errors)
    expected = dict(zip(map(str, LENGTHS), in_memory("llama", "full"), strict=True))
    assert all(out.completions[0].token_ids == expected[n] for n, out in outputs.items() if out.error is None)
    assert answers(engine) == in_memory("llama", "full")


def test_a_disk_without_room_says_what_is_free(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    with pytest.raises(DataError, match=r"bytes for KV are wanted and [\d,]+ are free") as refused:
        file.grow(1 << 60)
    assert str(tmp_path) in str(refused.value)
    file.grow(1 << 20)
    assert os.fstat(file._fd).st_size == 1 << 20
    file.close()


def test_what_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    plan = Plan(kv={"disk": 1.0})
    with pytest.raises(OptionError, match="no such folder"):
        mp.LLM(folders["llama"], plan=plan, disk=tmp_path / "not-there")
    with pytest.raises(OptionError, match="prefix_cache=True"):
        mp.LLM(folders["llama"], plan=plan, prefix_cache=True)
    with pytest.raises(OptionError, match="method 'simlayerkv' compares all layers"):
        mp.LLM(folders["llama"], plan=plan, method="simlayerkv", budget=200)


# ---------------------------------------------------------------------- what is left behind


def test_the_page_cache_stays_empty_and_the_folder_too(folders: dict[str, Path], tmp_path: Path) -> None:
    plan = Plan(kv={"disk": 1.0})
    with mp.LLM(folders["llama"], plan=plan, disk=tmp_path, method="full") as llm:
        params = mp.SamplingParams(max_tokens=20, temperature=0)
        for length in LENGTHS:
            llm.engine.add(Request(request_id=str(length), prompt=prompt(length), params=params))
        for _ in range(10):
            llm.engine.step()
        tier = llm.engine._parts.disk_tier
        assert tier is not None
        assert tier.bytes_written > 0
        assert list(tmp_path.iterdir()) == []
        files: list[Any] = [extents._file for extents in tier._extents.values()]
        cached = [cached_bytes(Path(f"/proc/self/fd/{file._fd}")) for file in files]
        assert all(n in (0, None) for n in cached)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_nothing_is_left_after_a_kill(folders: dict[str, Path], tmp_path: Path) -> None:
    code = CHILD.format(folder=str(folders["llama"]), disk=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    written = int(child.stdout.readline())
    assert written > 0
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert child.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


CHILD = """
import time, warnings
warnings.simplefilter("ignore")
import millpond as mp
from millpond.engine.offload.plan import Plan
from millpond.engine.request import Request
llm = mp.LLM({folder!r}, plan=Plan(kv={{"disk": 1.0}}), disk={disk!r}, method="full")
llm.engine.add(Request(request_id="a", prompt=tuple(range(3, 90)), params=mp.SamplingParams(max_tokens=50)))
for _ in range(5):
    llm.engine.step()
print(llm.engine._parts.disk_tier.bytes_written, flush=True)
time.sleep(600)
"""
