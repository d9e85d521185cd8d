"""A fault at any read or write of KV and weights ends no request that need not end, and those that end say why."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.open import open_in_memory
from millpond.engine.offload.plan import Plan
from millpond.engine.request import Request
from millpond.errors import DataError
from millpond.tiers.threads import ThreadBackend
from tests.engine.test_offload import model, options, prompt
from tests.helpers.tiers.scripted import READ_FAULTS, WRITE_FAULTS, Script, ScriptedFile, ScriptedScratch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LENGTHS = (9, 64, 33)
#: Places of the fault, in eighths of all reads or writes of a run.
PLACES = range(8)


def run(engine: Engine) -> dict[int, Any]:
    params = mp.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    for length in LENGTHS:
        engine.add(Request(request_id=str(length), prompt=prompt(length), params=params))
    found = {int(out.request_id): out for out in engine.drain()}
    engine.check_integrity()
    assert set(found) == set(LENGTHS), "each request ends, one way or the other"
    return found


@cache
def expected() -> dict[int, list[int]]:
    engine = Engine(model("llama"), **options("h2o"))
    found = run(engine)
    engine.close()
    return {length: out.completions[0].token_ids for length, out in found.items()}


def ended(found: dict[int, Any]) -> list[DataError]:
    """The errors of requests, after the tokens of all of them were compared."""
    errors = []
    for length, out in found.items():
        tokens = out.completions[0].token_ids
        if out.error is None:
            assert tokens == expected()[length]
        else:
            assert tokens == expected()[length][: len(tokens)]
            assert isinstance(out.error, DataError)
            errors.append(out.error)
    return errors


@pytest.fixture
def with_kv_on_disk(tmp_path: Path) -> Iterator[Engine]:
    for script in (ScriptedScratch.reads, ScriptedScratch.writes):
        script.begin()
    tier = DiskTier(tmp_path, (1, 3), open_file=ScriptedScratch, backend=ThreadBackend(1))
    engine = Engine(model("llama"), **options("h2o"), tier=tier)
    yield engine
    engine.close()


#: Reads or writes of a run without a fault.
counted: dict[str, int] = {}


def fails(engine: Engine, script: Script, first: int, times: int, fault: str) -> list[DataError]:
    """The errors of a run with a fault; one after it has none."""
    script.begin(first, times, fault)
    errors = ended(run(engine))
    assert script.met > 0, "the fault was met"
    script.begin()
    assert ended(run(engine)) == []
    return errors


def place_of(engine: Engine, script: Script, eighth: int, kind: str) -> int:
    """The number of a read or write; a run without a fault counts them, once."""
    if kind not in counted:
        script.begin()
        assert ended(run(engine)) == []
        counted[kind] = script.n
    assert counted[kind] > 8
    return counted[kind] * eighth // 8


@pytest.mark.covering
@pytest.mark.parametrize(
    ("fault", "times"),
    [
        pytest.param(fault, times, marks=pytest.mark.slow if (fault, times) == ("stale", 4) else ())
        for fault in READ_FAULTS
        for times in (1, 4)
    ],
)
@pytest.mark.parametrize("eighth", PLACES)
def test_a_read_of_kv(eighth: int, fault: str, times: int, with_kv_on_disk: Engine) -> None:
    """Once wrong is read again; wrong for good ends the one request whose KV it is."""
    script = ScriptedScratch.reads
    errors = fails(with_kv_on_disk, script, place_of(with_kv_on_disk, script, eighth, "KV read"), times, fault)
    assert len(errors) <= (0 if times == 1 else 2), "a read that others follow at once may be of another request"
    for error in errors:
        assert "at offset" in str(error)


@pytest.mark.covering
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("fault", WRITE_FAULTS)
@pytest.mark.parametrize("eighth", PLACES)
def test_a_write_of_kv(eighth: int, fault: str, times: int, with_kv_on_disk: Engine) -> None:
    """A write that says that it failed is made again; one that does not is noticed when it is read."""
    script = ScriptedScratch.writes
    errors = fails(with_kv_on_disk, script, place_of(with_kv_on_disk, script, eighth, "KV write"), times, fault)
    silent = fault in ("flipped", "lost")
    assert len(errors) <= (times if silent else times - 1)
    for error in errors:
        assert "at offset" in str(error)


@pytest.mark.covering
@pytest.mark.parametrize("times", [1, 8])
@pytest.mark.parametrize("fault", ["error", "short"])
@pytest.mark.parametrize("ends", ["host", "disk"])
@pytest.mark.parametrize("eighth", PLACES)
def test_a_read_of_weights(eighth: int, ends: Any, fault: str, times: int, tmp_path: Path) -> None:
    """Wrong each time ends the requests of the step; those that wait go on, and so does the engine.

    Each of two slots is read twice ahead and twice when it is needed: of eight failures in a row some end a step. With
    ends on the disk a tile of the head or a row of the embeddings may be what cannot be read.
    """
    ScriptedFile.reads.begin()
    model("llama").save_pretrained(tmp_path)
    plan = Plan(weights={"disk": 1.0}, slots=2, prompt_rows=256, ends=ends)
    found = open_in_memory(
        tmp_path, "12MiB", plan, None, EngineConfig(**options("h2o")), open_file=ScriptedFile, backend=ThreadBackend(1)
    )
    engine = Engine(found.model, None, found.config, streamed=found.streamed)
    first = place_of(engine, ScriptedFile.reads, eighth, f"weights, ends={ends}")
    errors = fails(engine, ScriptedFile.reads, first, times, fault)
    assert len(errors) <= (0 if times == 1 else len(LENGTHS))
    if (ends, fault) != ("disk", "short"):  # half of a read may hold the whole row
        assert bool(errors) == (times == 8)
    for error in errors:
        assert "safetensors at offset" in str(error)
    engine.close()
