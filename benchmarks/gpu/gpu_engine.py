"""The engine on the 8B shape: decoding steps, steady decoding in a given memory, prompts, and a profile of a step."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from gpu_bounds import Rates, measure_rates, prompt_flop, read_weight_bytes
from gpu_machine import Machine
from gpu_profile import profiled
from gpu_rows import Cell, Row
from gpu_shapes import llama_8b, random_model

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.memory_estimate import estimate
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request

#: What caches hold, by the name that rows and tables show.
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "h2o 20%": {"method": "h2o", "budget": "20%"},
    "snapkv 20%": {"method": "snapkv", "budget": "20%"},
    "int4": {"method": "full", "codec": "int4"},
    "rotated4": {"method": "full", "codec": "rotated4"},
    "fp8": {"method": "full", "codec": "fp8"},
}
#: What the steady section runs besides: eviction and codes together.
STEADY = SETTINGS | {"h2o 20%, int4": {"method": "h2o", "budget": "20%", "codec": "int4"}}
#: Memory of all caches of the steady section.
STEADY_BYTES = 30 * 10**9
#: Memory of the device that no cache gets: activations, records, tables.
SPARE_BYTES = 6 * 2**30
#: Steps that count, so that each sequence fills at least one page; and those before them.
STEPS, WARM = 72, 6
#: Most answers of a request, and steps in which the prompt of the next one is read at most.
MOST_ANSWERS, NEXT_PROMPT = 128, 8


class Shape(NamedTuple):
    """Sequences that decode, and the tokens of the prompt of each."""

    batch: int
    context: int


@dataclass
class Bench:
    """The model and the rates of the device, made when the first cell needs them."""

    machine: Machine

    @cached_property
    def rates(self) -> Rates:
        return measure_rates(self.machine)

    @cached_property
    def model(self) -> Any:
        return random_model(llama_8b(self.machine.tiny), self.machine.device)

    def free(self) -> None:
        """Give the memory of the model back."""
        self.__dict__.pop("model", None)
        gc.collect()
        self.machine.reset_memory()

    @contextmanager
    def engine(self, given: dict[str, Any], running: int) -> Iterator[Engine]:
        """An engine without a limit of its own."""
        gc.collect()
        self.machine.reset_memory()
        with mp.LLM(self.model, max_step_tokens=8192, max_running=max(running, 2), **given) as llm:
            yield llm.engine

    def prompt(self, tokens: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(tokens)
        return tuple(torch.randint(2, 500, (tokens,), generator=generator).tolist())


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


def step_cells(bench: Bench) -> list[Cell]:
    """A decoding step of some sequences of equal length."""
    small, *_, most = batch_sizes(bench.machine)
    shapes = [Shape(small, 8192), Shape(16, 8192), Shape(most, 8192), Shape(16, 4096), Shape(most, 4096)]
    shapes.append(Shape(small, 4096))
    if bench.machine.tiny:
        shapes = [Shape(most, 48)]
    # a batch says more than one sequence, and the largest takes longest
    order = sorted(shapes, key=lambda shape: (shape.batch == most, shape.batch != 16))
    return [
        Cell("step", f"{name}, {shape.batch} x {shape.context}", partial(measured_step, bench, given, shape), 6.0)
        for shape in order
        for name, given in SETTINGS.items()
    ]


def steady_cells(bench: Bench) -> list[Cell]:
    """As many sequences of one length as 30 GB for caches hold."""
    context, limit = (48, 4 * 2**20) if bench.machine.tiny else (8192, STEADY_BYTES)
    return [
        Cell("steady", name, partial(measured_steady, bench, given, context, limit), 12.0)
        for name, given in STEADY.items()
    ]


def prompt_cells(bench: Bench) -> list[Cell]:
    """One prompt, from its arrival to its first token."""
    lengths = (48,) if bench.machine.tiny else (8192, 32_768)
    return [
        Cell("prompt", f"{name}, {tokens}", partial(measured_prompt, bench, given, tokens), 4.0 + tokens / 4096)
        for tokens in lengths
        for name, given in SETTINGS.items()
    ]


def profile_cells(bench: Bench) -> list[Cell]:
    """Where the time of a step goes."""
    shape = Shape(3, 48) if bench.machine.tiny else Shape(16, 8192)
    names = ("full", "h2o 20%", "int4")
    return [
        Cell(
            "profile",
            f"{name}, {shape.batch} x {shape.context}",
            partial(profiled_step, bench, SETTINGS[name], shape),
            15.0,
        )
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


def measured_steady(bench: Bench, given: dict[str, Any], context: int, limit: int) -> Row:
    """The same with as many sequences as a memory limit admits, prompts read one after another."""
    steps = 4 if bench.machine.tiny else STEPS
    new = WARM + steps + 1
    with bench.engine(given, 1) as engine:
        need = estimate(engine.cache_factory, context, new, 1)
    most = 8 if bench.machine.tiny else 1024
    n = min(most, 1 + (limit - max(need.prefill, need.each)) // need.each)
    with bench.engine(given, n) as engine:
        held = decode_alike(bench, engine, Shape(n, context), new)
        times = [timed(bench.machine, partial(step, engine)) for _ in range(new - 1)][WARM:]
        row = step_row(bench, engine, n, times, held)
    row["tokens_per_s"] = n * len(times) / sum(times)
    row["bound_tokens_per_s"] = n / row["bound_ms"] * 1e3
    return {"requests": n, "context": context, "limit_gb": limit / 1e9, **row}


def measured_prompt(bench: Bench, given: dict[str, Any], tokens: int) -> Row:
    """Seconds to the first token, the second of two times."""
    with bench.engine(given, 1) as engine:
        seconds = [timed(bench.machine, partial(read_prompt, bench, engine, tokens, f"{n}")) for n in range(2)][1]
    bound = prompt_flop(bench.model, tokens) / bench.rates.flop_per_s
    return {"tokens": tokens, "first_token_s": seconds, "bound_s": bound, "ratio": seconds / bound}


def profiled_step(bench: Bench, given: dict[str, Any], shape: Shape) -> Row:
    """Kernels, launches, synchronisations and gaps of some steps."""
    steps = 2 if bench.machine.tiny else 8
    with bench.engine(given, shape.batch) as engine:
        decode_alike(bench, engine, shape, WARM + 2 * steps + 3)
        for _ in range(WARM):
            step(engine)
        return profiled(bench.machine, partial(step, engine), steps)


# ---------------------------------------------------------------------- parts of cells


def decode_alike(bench: Bench, engine: Engine, shape: Shape, new: int) -> int:
    """Let sequences decode behind one prompt that is really read; each has pages of its own with the same content.

    Returns:
        Bytes of keys and values that one sequence holds.
    """
    prompt, caches = bench.prompt(shape.context), {}
    firsts = range(0, shape.batch, MOST_ANSWERS)
    for first in firsts:
        # what decodes already does so while the next prompt is read
        more = 0 if first == firsts[-1] else NEXT_PROMPT * len(firsts)
        n = min(shape.batch - first, MOST_ANSWERS)
        params = mp.SamplingParams(max_tokens=new + more, temperature=0.0, ignore_eos=True, n=n)
        engine.add(Request(request_id=str(first), prompt=prompt, params=params))
        while not any(out.request_id == str(first) and out.completions[0].token_ids for out in step(engine)):
            pass
    for first in firsts:
        found = engine.cache_of(str(first))
        assert found is not None, "answers decode as soon as they have a token"
        caches[id(found[0])] = found[0]
    for cache in caches.values():
        for layer in cache.layers:
            if layer.table is not None:
                layer.table.copy_on_write(whole=True)
    return int(cache.used_bytes(cache.held())[-1])


def read_prompt(bench: Bench, engine: Engine, tokens: int, name: str) -> None:
    """Read a prompt up to its first token."""
    params = mp.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.add(Request(request_id=name, prompt=bench.prompt(tokens), params=params))
    while engine.busy:
        step(engine)


def step(engine: Engine) -> list[RequestOutput]:
    """Run one step; a request that fails ends the cell, whose rest would measure nothing."""
    outputs = engine.step()
    for output in outputs:
        if any(completion.finish_reason == "error" for completion in output.completions):
            raise RuntimeError(f"request {output.request_id} failed: {output.error}")
    return outputs


def timed(machine: Machine, run: Callable[[], object]) -> float:
    """Seconds of one call, until the device is done."""
    machine.wait()
    begin = time.perf_counter()
    run()
    machine.wait()
    return time.perf_counter() - begin


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


def recorded(engine: Engine) -> Row:
    """How many graphs of steps were made and run."""
    graph = getattr(getattr(engine._model, "_lean", None), "_graph", None)
    return {} if graph is None else {"recorded": graph.recorded, "replayed": graph.replayed}
