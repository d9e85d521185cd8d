"""generate() on the 8B shape under our caches and under transformers' own."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from functools import partial
from typing import Any

import torch
from gpu_bounds import read_weight_bytes
from gpu_engine import Bench
from gpu_machine import Machine
from gpu_rows import Cell, Row
from transformers import DynamicCache, StaticCache, StoppingCriteria, StoppingCriteriaList

import millpond as mp
from millpond.models.cache_argument import cache_argument

CACHES: dict[str, dict[str, Any]] = {
    "DynamicCache": {},
    "StaticCache": {},
    "full": {"method": "full"},
    "h2o 20%": {"method": "h2o", "budget": "20%"},
    "snapkv 20%": {"method": "snapkv", "budget": "20%"},
    "int4": {"method": "full", "codec": "int4"},
    "streaming 20%": {"method": "streaming", "budget": "20%"},
}


def generate_cells(bench: Bench) -> list[Cell]:
    """Batches of one and of eight prompts."""
    shapes = [(2, 64, 6)] if bench.machine.tiny else [(1, 8192, 32), (8, 8192, 24)]
    return [
        Cell("generate", f"{name}, {batch} x {prompt}", partial(measured, bench, name, (batch, prompt, new)), 8.0)
        for batch, prompt, new in shapes
        for name in CACHES
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
    run(bench, name, ids, 4)
    gc.collect()
    bench.machine.reset_memory()
    begin = time.perf_counter()
    times = run(bench, name, ids, new)
    ms = statistics.median(late - early for early, late in itertools.pairwise(times[2:])) * 1e3
    bound_ms = read_weight_bytes(bench.model) / bench.rates.copy_bytes_per_s * 1e3
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
        "bound_of": "weights alone",
    }


def run(bench: Bench, name: str, ids: torch.Tensor, new: int) -> list[float]:
    """Generate, and return when each token was there."""
    times = TokenTimes(bench.machine)
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": new,
        "min_new_tokens": new,
        "disable_compile": True,
        "stopping_criteria": StoppingCriteriaList([times]),
    }
    model, static = bench.model, StaticCache
    with torch.no_grad():
        if CACHES[name]:
            with mp.compress(model, **CACHES[name]) as cache:
                model.generate(ids, **cache_argument(cache), **options)
        else:
            own: Any = (
                DynamicCache(config=model.config)
                if name == "DynamicCache"
                else static(config=model.config, max_cache_len=ids.shape[1] + new)
            )
            model.generate(ids, **cache_argument(own), **options)
    return times.times
