"""generate() on the 8B shape under our caches and under transformers' own, one of them with compiled steps."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from gpu_bench import Bench
from gpu_bounds import read_weight_bytes
from gpu_machine import Machine
from gpu_rows import Cell, Row
from transformers import DynamicCache, StaticCache, StoppingCriteria, StoppingCriteriaList

import millpond as mp
from millpond.models.cache_argument import cache_argument

#: StaticCache with steps that torch compiles, as generate() does by itself on a GPU.
COMPILED = "compiled StaticCache"
CACHES: dict[str, dict[str, Any]] = {
    "DynamicCache": {},
    "StaticCache": {},
    COMPILED: {},
    "full": {"method": "full"},
    "h2o 20%": {"method": "h2o", "budget": "20%"},
    "snapkv 20%": {"method": "snapkv", "budget": "20%"},
    "int4": {"method": "full", "codec": "int4"},
    "streaming 20%": {"method": "streaming", "budget": "20%"},
}


#: Those that are compared first; to compile steps takes longest.
FIRST_CACHES = ("DynamicCache", "StaticCache", "full", "h2o 20%")
OTHER_CACHES = tuple(name for name in CACHES if name not in (*FIRST_CACHES, COMPILED))


def generate_cells(bench: Bench, names: Sequence[str]) -> list[Cell]:
    """A batch of sixteen prompts, and one prompt, under some of the caches."""
    shapes = [(2, 64, 6)] if bench.machine.tiny else [(16, 8192, 24), (1, 8192, 32)]
    return [
        Cell(
            "generate",
            f"{name}, {batch} x {prompt}",
            partial(measured, bench, name, (batch, prompt, new)),
            6.0 + 0.7 * batch + (60.0 if name == COMPILED else 0.0),
        )
        for batch, prompt, new in shapes
        for name in names
    ]


class TokenTimes(StoppingCriteria):
    """Notes when each token of generate() was there, and never stops it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.BoolTensor:
        self._machine.wait()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


def measured(bench: Bench, name: str, shape: tuple[int, int, int]) -> Row:
    """Seconds to the first token, the median of a step, and the most memory; once before, so that kernels are there."""
    batch, prompt, new = shape
    ids = torch.tensor([bench.prompt(prompt + n)[:prompt] for n in range(batch)], device=bench.machine.device)
    run(bench, name, ids, new if name == COMPILED else 4)  # of another length it would be compiled again
    gc.collect()
    bench.machine.reset_memory()
    begin = time.perf_counter()
    times, held = run(bench, name, ids, new)
    ms = statistics.median(late - early for early, late in itertools.pairwise(times[2:])) * 1e3
    bound_ms = (read_weight_bytes(bench.model) + held) / bench.rates.copy_bytes_per_s * 1e3
    return {
        "batch": batch,
        "prompt": prompt,
        "cache": name,
        "first_token_s": times[0] - begin,
        "ms": ms,
        "tokens_per_s": batch / ms * 1e3,
        "peak_gb": bench.machine.peak_bytes() / 1e9,
        "bound_ms": bound_ms,
        "ratio": ms / bound_ms,
        "bound_of": "weights and what caches hold",
        "kv_bytes": held,
    }


def run(bench: Bench, name: str, ids: torch.Tensor, new: int) -> tuple[list[float], int]:
    """Generate, and return when each token was there, and the bytes that the cache held at the end."""
    times = TokenTimes(bench.machine)
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": new,
        "min_new_tokens": new,
        "disable_compile": name != COMPILED,
        "stopping_criteria": StoppingCriteriaList([times]),
    }
    model = bench.model
    with torch.no_grad():
        if CACHES[name]:
            with mp.compress(model, **CACHES[name]) as cache:
                model.generate(ids, **cache_argument(cache), **options)
                held = cache.stats().kv_bytes - cache.stats().unused_bytes
        else:
            model.generate(ids, **cache_argument(theirs(model, name, ids.shape[1] + new)), **options)
            config = model.config
            token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
            held = token * len(ids) * (ids.shape[1] + new)
    return times.times, int(held)


def theirs(model: Any, name: str, tokens: int) -> Any:
    """A cache of transformers for so many tokens."""
    static: Any = StaticCache
    return (
        DynamicCache(config=model.config)
        if name == "DynamicCache"
        else static(config=model.config, max_cache_len=tokens)
    )
