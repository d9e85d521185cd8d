"""The turns of `bench engines`: in every repetition every engine reads the same prompts once, in shuffled order.

Ratios are taken within a turn, between neighbours in time, and their median is reported: a machine that is busy for a
while slows both sides. Processes start again for every cell, so that their memory is that cell's.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from millpond.kernels import native
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.optional_peer import TIMEOUT_S, OptionalPeer
from millpond_lab.bench.engines.candidates import ConversionError, EngineCandidate, Weights
from millpond_lab.bench.generate.candidates import TINY, BenchModel, ModelShape, draw_prompts
from millpond_lab.peer_process import PeerError

READINGS = 5  #: of which the median counts


class Floor:
    """A buffer to read with as many threads as the engines have. It grows to the largest read."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read_ms(self, n_bytes: int) -> float | None:
        """Milliseconds in which `n_bytes` are read; None where there are no native kernels to read with."""
        if not native.is_available():
            return None
        if len(self._memory) < n_bytes:
            self._memory = torch.ones(n_bytes, dtype=torch.uint8)
            native.use_huge_pages([self._memory])
        times = []
        for _ in range(READINGS):
            start = time.perf_counter()
            native.read_bandwidth(self._memory.data_ptr(), n_bytes, self._threads)
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)


#: Milliseconds to read a number of bytes once; None where nothing can measure it.
ReadMs = Callable[[int], float | None]

WARM_UP, WARM_UP_TOKENS = 256, 4  #: tokens of the prompts and of the answers before the clock runs
PAUSE = 0.2  #: seconds in which the threads of the engine before go to sleep


@dataclass(frozen=True)
class EnginesPlan:
    """What is measured. timeout_s: that an engine may take to start, to load, or for one reading."""

    shape: BenchModel = field(default_factory=ModelShape)
    cells: tuple[tuple[int, int], ...] = ((1, 2048), (4, 2048), (1, 8192), (16, 2048))  # (batch, prompt)
    new_tokens: int = 32
    repeats: int = 3
    threads: int = 2
    seed: int = 0
    timeout_s: float = TIMEOUT_S


QUICK = EnginesPlan(shape=TINY, cells=((1, 512), (2, 512)), new_tokens=8, repeats=2)


@dataclass(frozen=True)
class EngineTiming:
    """One run of one engine.

    Attributes:
        prefill_s: until every sequence has its first token. decode_ms: a step of all sequences, the median.
        kv_bytes: of keys and values in use after the last step, as the engine counts them.
        rss_bytes: of the process at its peak while it answered, beyond what it held before it loaded the model.
        floor_ms: reading the weights and `kv_bytes` once, measured right after it; None where nothing can.
        weight_bytes: of the weights as the engine holds them; None where it does not say.
    """

    prefill_s: float
    decode_ms: float
    kv_bytes: int
    rss_bytes: int | None
    floor_ms: float | None
    weight_bytes: int | None = None


@dataclass
class EngineEntry:
    """A candidate in one cell: its process, and its readings by turn."""

    candidate: EngineCandidate
    child: OptionalPeer
    readings: dict[int, EngineTiming] = field(default_factory=dict)
    failure: str = ""

    def median(self, name: str) -> float | None:
        """The median of one number over the repetitions."""
        known = [v for r in self.readings.values() if (v := getattr(r, name)) is not None]
        return statistics.median(known) if known else None

    @property
    def above_floor(self) -> float | None:
        """The median over the turns of how many times as long as reading weights and entries once a step took."""
        ratios = [r.decode_ms / r.floor_ms for r in self.readings.values() if r.floor_ms]
        return statistics.median(ratios) if ratios else None

    def ratio(self, name: str, base: EngineEntry | None) -> float | None:
        """The median over the turns of how many times as much it took as `base`."""
        if base is None:
            return None
        turns = [t for t in self.readings if t in base.readings and getattr(base.readings[t], name)]
        ratios = [getattr(self.readings[t], name) / getattr(base.readings[t], name) for t in turns]
        return statistics.median(ratios) if ratios else None


def run(
    plan: EnginesPlan,
    candidates: Sequence[EngineCandidate],
    folder: Path,
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[dict[str, Any]], None] = lambda data: None,
) -> dict[str, Any]:
    """Measure every candidate in every cell; returns what `markdown` writes.

    Models are kept in `folder`. After each cell `keep` is handed what is known so far.
    """
    weights, machine = Weights(plan.shape, plan.seed, folder, plan.timeout_s), describe_machine()
    floor, to_read = Floor(plan.threads), plan.shape.weight_bytes()
    notes: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    data = {
        **machine.header("engines"),
        "model": {**plan.shape.config(), "dtype": "bfloat16"},
        "weight_bytes": to_read,
        "new_tokens": plan.new_tokens,
        "repeats": plan.repeats,
        "threads": plan.threads,
        "seed": plan.seed,
        "engines": notes,
        "results": rows,
    }
    for cell in plan.cells:
        rows += _cell(plan, candidates, weights, floor.read_ms, to_read, notes, *cell, progress)
        keep(data)
    return data


def _cell(
    plan: EnginesPlan,
    candidates: Sequence[EngineCandidate],
    weights: Weights,
    floor: ReadMs,
    to_read: int,
    notes: dict[str, str],
    batch: int,
    prompt: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    rng = random.Random(plan.seed)
    where = f"batch {batch}, prompt {prompt}"
    with ExitStack() as stack:
        entries = []
        for candidate in candidates:
            progress(f"{where}: starting {candidate.label}")
            kind = candidate.kind
            child = OptionalPeer(kind.name, kind.python, kind.script, kind.made_by, plan.timeout_s)
            entries.append(EngineEntry(candidate, stack.enter_context(child)))
            notes[kind.name] = entries[-1].child.note
            _load(entries[-1], plan, weights, batch, prompt)
        for turn in range(-1, plan.repeats):
            warming = turn < 0
            length = min(prompt, WARM_UP) if warming else prompt
            prompts = draw_prompts(plan.shape, batch, length, plan.seed + turn + 1).tolist()
            for entry in rng.sample(entries, len(entries)):
                progress(f"{where}, turn {turn + 1} of {plan.repeats}: {entry.candidate.label}")
                reading = _take(entry, prompts, WARM_UP_TOKENS if warming else plan.new_tokens, floor, to_read)
                if reading is not None and not warming:
                    entry.readings[turn] = reading
    return [_row(entry, entries, batch, prompt) for entry in entries]


def _load(entry: EngineEntry, plan: EnginesPlan, weights: Weights, batch: int, prompt: int) -> None:
    """The engine's process loads the model; a reason why it cannot is kept as its failure."""
    if not entry.child.running:
        entry.failure = entry.child.note
        return
    candidate = entry.candidate
    try:
        model = candidate.kind.model(weights)
        settings = candidate.settings(batch, prompt, plan.new_tokens)
        entry.child.ask({"load": {"model": str(model), "threads": plan.threads, **settings}})
    except (ConversionError, PeerError) as error:
        entry.failure = str(error)


def _take(
    entry: EngineEntry, prompts: list[list[int]], new_tokens: int, floor: ReadMs, to_read: int
) -> EngineTiming | None:
    """One reading. An engine that fails is reported with its reason and not run again in this cell.

    to_read: bytes of the weights, where the engine does not say how many it holds.
    """
    if entry.failure:
        return None
    time.sleep(PAUSE)
    try:
        answer = entry.child.ask({"prompts": prompts, "new_tokens": new_tokens})
    except PeerError as error:
        entry.failure = str(error)
        return None
    steps = answer.pop("steps_ms")
    time.sleep(PAUSE)
    read = answer["kv_bytes"] + (answer.get("weight_bytes") or to_read)
    return EngineTiming(decode_ms=statistics.median(steps), floor_ms=floor(read), **answer)


def _row(entry: EngineEntry, entries: Sequence[EngineEntry], batch: int, prompt: int) -> dict[str, Any]:
    base = next((e for e in entries if e.candidate.label == entry.candidate.against), None)
    names = ("prefill_s", "decode_ms", "kv_bytes", "rss_bytes", "weight_bytes")
    return {
        "name": entry.candidate.kind.name,
        "setting": entry.candidate.setting,
        "batch": batch,
        "prompt": prompt,
        "against": entry.candidate.against,
        **{name: entry.median(name) for name in names},
        "prefill_ratio": entry.ratio("prefill_s", base),
        "decode_ratio": entry.ratio("decode_ms", base),
        "above_floor": entry.above_floor,
        "readings": [asdict(reading) for reading in entry.readings.values()],
        **({"failure": entry.failure} if entry.failure else {}),
    }
