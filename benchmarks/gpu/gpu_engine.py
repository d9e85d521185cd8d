"""The engine on the 8B shape: decoding steps, steady decoding in a given memory, and a profile of a step."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from gpu_bench import SPARE_BYTES, WARM, Bench, Shape, decode_alike, recorded, step, timed
from gpu_bounds import read_weight_bytes
from gpu_goals import goals_of
from gpu_machine import Machine
from gpu_profile import profiled
from gpu_rows import Cell, Row
from gpu_settings import H2O, SETTINGS, board_setting, steady_settings

from millpond.engine.engine import Engine

#: Memory of all caches of the steady section.
STEADY_BYTES = 30 * 10**9
#: Steps that count, so that each sequence fills at least one page.
STEPS = 72
#: Tokens of the prompts of the steady section; cells of the first name none.
STEADY, LONG = 8192, 32_768


def batch_sizes(machine: Machine) -> tuple[int, ...]:
    """1, 16 and as many sequences of 8,192 tokens as the device holds in bf16: 64, or 48."""
    if machine.tiny:
        return (1, 3)
    kv_bytes = 8192 * 32 * 8 * 128 * 2 * 2
    room = torch.cuda.get_device_properties(0).total_memory - 16 * 2**30 - SPARE_BYTES
    return (1, 16, 64 if 64 * kv_bytes < room else 48)


def rates_cells(bench: Bench) -> list[Cell]:
    """The rates that bounds are made of."""
    return [Cell("rates", "device", lambda: vars(bench.rates), 6.0)]


def step_cells(bench: Bench, with_goal: bool) -> list[Cell]:
    """A decoding step of some sequences of equal length: those that have a goal, or the others."""
    small, *_, most = batch_sizes(bench.machine)
    shapes = [Shape(small, 4096), Shape(16, 8192), Shape(most, 8192)]
    shapes += [Shape(small, 8192), Shape(16, 4096), Shape(most, 4096)]
    if bench.machine.tiny:
        return [] if with_goal else step_cells_of(bench, [Shape(most, 48)])
    return [cell for cell in step_cells_of(bench, shapes) if bool(goals_of("step", cell.name)) == with_goal]


def step_cells_of(bench: Bench, shapes: list[Shape]) -> list[Cell]:
    """Every setting in every shape."""
    return [
        Cell("step", f"{name}, {shape.batch} x {shape.context}", partial(measured_step, bench, given, shape), seconds)
        for shape in shapes
        for seconds in (3.0 + shape.batch * shape.context / 50_000,)
        for name, given in SETTINGS.items()
    ]


def steady_cells(bench: Bench, context: int, first: int = 0, last: int | None = None) -> list[Cell]:
    """As many sequences of one length as 30 GB for caches hold: some of the settings, in their order."""
    limit, tokens = STEADY_BYTES, context
    if bench.machine.tiny:
        limit, tokens = 4 * 2**20, {STEADY: 48, LONG: 96}[context]
    suffix = "" if context == STEADY else f", {context}"
    seconds = 9.0 if context == STEADY else 16.0
    return [
        Cell("steady", f"{name}{suffix}", partial(measured_steady, bench, name, tokens, limit), seconds)
        for name in list(steady_settings())[first:last]
    ]


def profile_cells(bench: Bench) -> list[Cell]:
    """Where the time of a step goes."""
    shape = Shape(3, 48) if bench.machine.tiny else Shape(16, 8192)
    names = ("full", H2O, "int4")
    return [
        Cell("profile", f"{name}, {shape.batch} x {shape.context}", partial(profiled_step, bench, name, shape), 5.0)
        for name in names
    ]


# ---------------------------------------------------------------------- cells


def measured_step(bench: Bench, given: dict[str, Any], shape: Shape) -> Row:
    """Median and mean of a step, and the bytes that it must read over the bandwidth of a copy."""
    steps = 4 if bench.machine.tiny else STEPS
    with bench.engine(given, shape.batch) as engine:
        held = decode_alike(bench, engine, shape, WARM + steps + 1)
        times = [timed(bench.machine, partial(step, engine)) for _ in range(WARM + steps)][WARM:]
        row = step_row(bench, engine, shape.batch, times, held)
    return {"batch": shape.batch, "context": shape.context, **row}


def measured_steady(bench: Bench, name: str, context: int, limit: int) -> Row:
    """The same with as many sequences as a memory limit admits, prompts read one after another."""
    given = steady_settings()[name]
    steps = 4 if bench.machine.tiny else STEPS
    new = WARM + steps + 1
    n = bench.most_running(given, (context, new), limit)
    with bench.engine(given, n) as engine:
        held = decode_alike(bench, engine, Shape(n, context), new)
        times = [timed(bench.machine, partial(step, engine)) for _ in range(new - 1)][WARM:]
        row = step_row(bench, engine, n, times, held)
    row["tokens_per_s"] = n * len(times) / sum(times)
    row["bound_tokens_per_s"] = n / row["bound_ms"] * 1e3
    board = board_setting()
    kept = {"kept_on_board": board[2]} if name == board[0] else {}
    return {"requests": n, "context": context, "limit_gb": limit / 1e9, **row, **kept}


def profiled_step(bench: Bench, name: str, shape: Shape) -> Row:
    """Kernels, launches, synchronisations and gaps of some steps."""
    steps = 2 if bench.machine.tiny else 8
    with bench.engine(SETTINGS[name], shape.batch) as engine:
        decode_alike(bench, engine, shape, WARM + 2 * steps + 3)
        for _ in range(WARM):
            step(engine)
        return profiled(bench.machine, partial(step, engine), steps)


def step_row(bench: Bench, engine: Engine, batch: int, times: list[float], held: int) -> Row:
    """What a step took, and what reading the weights and what the caches held takes, once."""
    n_bytes = read_weight_bytes(bench.model) + batch * held
    bound_ms = n_bytes / bench.rates.copy_bytes_per_s * 1e3
    ms = statistics.median(times) * 1e3
    return {
        "ms": ms,
        "mean_ms": statistics.mean(times) * 1e3,
        "slowest_ms": max(times) * 1e3,
        "steps": len(times),
        "bound_ms": bound_ms,
        "ratio": ms / bound_ms,
        "bytes": n_bytes,
        "kv_bytes_each": held,
        "peak_gb": bench.machine.peak_bytes() / 1e9,
        "caches": "copies of one prompt's",
        **recorded(engine),
    }
