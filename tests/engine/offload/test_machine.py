"""Constants of a machine: measured, kept, and read with care."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from millpond.engine.offload import measure as measuring
from millpond.engine.offload.machine import ROWS, WEIGHTS, CallTimes, MachineConstants
from millpond.engine.offload.machine_file import machine_constants, path_of, read, write
from millpond.engine.offload.measure import hardware, read_speed
from millpond.errors import OptionError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def constants(folder: Path) -> MachineConstants:
    table = {rows: 1e9 * rows**0.5 for rows in ROWS}
    return MachineConstants(
        read_per_s=1e9,
        write_per_s=2e9,
        burst_per_s=3e9,
        memory_per_s=1e10,
        attention=5e10,
        read_cpu_s=1e-10,
        flops=dict.fromkeys(WEIGHTS, table),
        calls=CallTimes(step_s=1e-3, layer_s=2e-4, sequence_s=0.0, piece_s=1e-3, prompt_s=1e-3),
        disk_calls=CallTimes(step_s=0.0, layer_s=2e-3, sequence_s=0.0, piece_s=1e-3, prompt_s=0.0),
        cores=2,
        folder=str(folder.resolve()),
        hardware=hardware(),
        threads=1,
        date="2026-01-01T00:00:00+00:00",
    )


def test_rates_between_measured_rows_lie_on_a_line_of_logarithms(tmp_path: Path) -> None:
    found = constants(tmp_path)
    assert found.rate("bf16", 64) == pytest.approx(8e9)
    assert found.rate("bf16", 90) == pytest.approx(1e9 * 90**0.5)
    assert found.rate("bf16", 5000) == pytest.approx(found.rate("bf16", 1024))
    assert found.rate("bf16", 0.5) == pytest.approx(5e8)


def test_constants_are_measured_once_and_again_on_demand(tmp_path: Path) -> None:
    calls: list[Path] = []

    def measured_by(folder: Path, report: Any) -> MachineConstants:
        calls.append(folder)
        return constants(folder)

    for _ in range(2):
        assert machine_constants(tmp_path, measured_by=measured_by) == constants(tmp_path)
    assert len(calls) == 1
    machine_constants(tmp_path, again=True, measured_by=measured_by)
    assert len(calls) == 2
    assert [file.suffix for file in path_of(tmp_path).parent.iterdir()] == [".json"]


DAMAGE: list[Any] = [
    {"format": 1},
    {"read_per_s": 0},
    {"read_per_s": float("inf")},
    {"read_per_s": "1"},
    {"memory_per_s": True},
    {"flops": {}},
    {"flops": {"bf16": {"1": 1.0}, "f32": {}}},
    {"flops": 3},
    {"threads": 0},
    {"hardware": 7},
    {"accelerator": {}},
    {"settled": 1},
    {"date": None},
    {"attention": 0},
    {"cores": 0},
    {"read_cpu_s": -1.0},
    {"calls": {}},
    {"disk_calls": {}},
    {"calls": {"step_s": 1.0}},
    {"calls": 3},
    {"flops": {"bf16": {}, "f32": {}, "int8": {}}},
]


@pytest.mark.parametrize("damage", DAMAGE, ids=str)
def test_a_damaged_file_counts_as_none(tmp_path: Path, damage: dict[str, Any]) -> None:
    place = path_of(tmp_path)
    write(place, constants(tmp_path))
    assert read(place) == constants(tmp_path)
    place.write_text(json.dumps({**json.loads(place.read_text()), **damage}))
    assert read(place) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 50_000, b" " * 70_000])
def test_a_file_that_is_no_json_object_counts_as_none(tmp_path: Path, content: bytes) -> None:
    place = path_of(tmp_path)
    place.parent.mkdir(parents=True)
    place.write_bytes(content)
    assert read(place) is None


def test_a_pipe_in_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    place = path_of(tmp_path)
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    assert read(place) is None


def test_constants_of_another_machine_are_not_used(tmp_path: Path) -> None:
    other = constants(tmp_path)
    write(path_of(tmp_path), MachineConstants(**{**_fields(other), "hardware": "another"}))
    assert machine_constants(tmp_path, measured_by=lambda folder, report: other) == other


def _fields(found: MachineConstants) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in fields(found) if field.init}


def test_reads_go_on_until_two_spans_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SPAN_S", 0.05)
    shares: list[float] = []
    found = read_speed(tmp_path, shares.append, file_bytes=8 * 2**20)
    assert 2 <= len(shares) <= measuring.SPANS
    assert found.settled or len(shares) == measuring.SPANS
    assert 0 < found.sustained <= found.burst
    assert found.written > 0
    assert 0 < found.cpu_s < 1e-6
    assert list(tmp_path.iterdir()) == []


def test_a_burst_is_read_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that slows down after its first span: the sustained speed is that of the last two."""
    clock = iter(range(10**9))
    now = [0.0]

    def perf_counter() -> float:
        now[0] += 1e-6
        return now[0]

    def slow(handle: int, buffer: Any, at: int) -> int:
        now[0] += measuring.SPAN_S / (30 if next(clock) < 30 else 10)
        return len(buffer)

    monkeypatch.setattr(measuring, "_read", slow)
    monkeypatch.setattr(measuring.time, "perf_counter", perf_counter)
    found = read_speed(tmp_path, file_bytes=measuring.REQUEST)
    assert found.settled
    assert found.burst == pytest.approx(3 * found.sustained, rel=0.1)


@pytest.mark.parametrize("on_disk", [False, True])
def test_steps_of_a_small_model_are_timed(monkeypatch: pytest.MonkeyPatch, on_disk: bool) -> None:
    """Differences of times may be lost in the noise of a busy machine; the times themselves are not."""
    monkeypatch.setattr(measuring, "_PROMPTS", 2)
    found = measuring._steps(1, on_disk)
    assert all(0 < seconds < 10 for times in found for seconds in times)


def test_call_times_are_found_in_the_times_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a machine whose call times are known, with and without a disk."""
    memory = CallTimes(step_s=0.01, layer_s=0.002, sequence_s=0.0001, piece_s=0.003, prompt_s=0.005)
    disk = CallTimes(step_s=0.02, layer_s=0.007, sequence_s=0.0003, piece_s=0.004, prompt_s=0.004)

    def steps(n_layers: int, on_disk: bool) -> Any:
        of = disk if on_disk else memory
        few, many = (of.step_s + n_layers * (of.layer_s + n * of.sequence_s) for n in (measuring._FEW, measuring._MANY))
        times = measuring._Steps(n_layers * of.piece_s, n_layers * (of.piece_s + of.prompt_s), few, many)
        return measuring._Measured(times, times)

    monkeypatch.setattr(measuring, "_steps", steps)
    found, added = measuring.call_times()
    for name in (field.name for field in fields(CallTimes)):
        was = getattr(memory, name)
        assert getattr(found, name) == pytest.approx(was), name
        assert getattr(added, name) == pytest.approx(max(getattr(disk, name) - was, 0), abs=1e-9), name


def test_rates_of_products_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PRODUCT_S", 0.01)
    monkeypatch.setattr(measuring, "SIDE", 256)
    for name in WEIGHTS:
        assert 1e6 < measuring._product_rate(16, name) < 1e14
    assert 1e6 < measuring._attention_rate() < 1e14


def test_a_folder_that_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no such folder"):
        read_speed(tmp_path / "none")
    with pytest.raises(OptionError, match="bytes free, and"):
        read_speed(tmp_path, file_bytes=2**60)
