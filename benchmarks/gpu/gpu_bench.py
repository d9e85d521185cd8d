"""The engine on a model of a known shape: what the cells of the GPU benchmarks share."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from gpu_bounds import Rates, measure_rates
from gpu_machine import Machine
from gpu_rows import Row
from gpu_shapes import llama_8b, random_model

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.memory_estimate import estimate
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request

#: Memory of the device that no cache gets: activations, records, tables.
SPARE_BYTES = 6 * 2**30
#: Steps before those that count.
WARM = 6
#: Most answers of a request, and steps in which the prompt of the next one is read at most.
MOST_ANSWERS, NEXT_PROMPT = 128, 8


class Shape(NamedTuple):
    """Sequences that decode, and the tokens of the prompt of each."""

    batch: int
    context: int


class Bench:
    """The model and the rates of the device, made when the first cell needs them.

    Args:
        machine: where it is.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._other: tuple[Callable[[bool], Any], Any] | None = None

    @cached_property
    def rates(self) -> Rates:
        return measure_rates(self.machine)

    @cached_property
    def model(self) -> Any:
        """The model of the 8B shape."""
        self._other = None
        return random_model(llama_8b(self.machine.tiny), self.machine.device)

    def other_model(self, shape: Callable[[bool], Any]) -> Any:
        """A model of another shape, in place of the one before."""
        if self._other is None or self._other[0] is not shape:
            self.free()
            self._other = shape, random_model(shape(self.machine.tiny), self.machine.device)
        return self._other[1]

    def free(self) -> None:
        """Give the memory of the model back."""
        self.__dict__.pop("model", None)
        self._other = None
        gc.collect()
        self.machine.reset_memory()

    @contextmanager
    def engine(self, given: dict[str, Any], running: int, model: Any = None) -> Iterator[Engine]:
        """An engine without a limit of its own, of the 8B shape unless a model is given."""
        gc.collect()
        self.machine.reset_memory()
        made = self.model if model is None else model
        with mp.LLM(made, max_step_tokens=8192, max_running=max(running, 2), **given) as llm:
            yield llm.engine

    def prompt(self, tokens: int, n: int = 0) -> tuple[int, ...]:
        """The n-th prompt of that many tokens; they begin differently."""
        generator = torch.Generator().manual_seed(tokens + 1_000_003 * n)
        return tuple(torch.randint(2, 500, (tokens,), generator=generator).tolist())

    def most_running(self, given: dict[str, Any], shape: tuple[int, int], limit: int) -> int:
        """How many sequences of (prompt, answer) tokens `limit` bytes of caches hold while one more prompt is read."""
        with self.engine(given, 1) as engine:
            need = estimate(engine.cache_factory, *shape, 1)
        return int(min(8 if self.machine.tiny else 1024, 1 + (limit - max(need.prefill, need.each)) // need.each))


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


def add_prompt(engine: Engine, name: str, prompt: tuple[int, ...], new: int) -> None:
    """Let a request wait whose answer has `new` tokens."""
    params = mp.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    engine.add(Request(request_id=name, prompt=prompt, params=params))


def read_prompt(engine: Engine, name: str, prompt: tuple[int, ...]) -> None:
    """Read a prompt up to its first token."""
    add_prompt(engine, name, prompt, 1)
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


def recorded(engine: Engine) -> Row:
    """How many graphs of steps were made and run."""
    graph = getattr(getattr(engine._model, "_lean", None), "_graph", None)
    return {} if graph is None else {"recorded": graph.recorded, "replayed": graph.replayed}
