"""Seconds of one batch from its prompts to the end of its answers, as Table 5 of H2O counts them (arXiv:2306.14048).

OPT-30B with a prompt of 7,000 tokens and an answer of 1,024, OPT-6.7B with 24 prompts of 2,048 and answers of 2,048;
random weights on the device. Prompts are distinct and really read. Of the steps some are timed behind the prompt, and
where caches grow some more at the length that they have at the end; those in between are taken as the mean of both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_bench import SPARE_BYTES, WARM, Bench, add_prompt, read_prompt, step, timed
from gpu_bounds import prompt_flop, read_weight_bytes
from gpu_rows import Cell, Row
from gpu_served import until_all_decode
from gpu_settings import H2O, SETTINGS, Given
from gpu_shapes import kv_token_bytes, opt_6_7b, opt_30b, parameter_bytes

#: Steps that are timed at each length.
STEPS = 64


class Batch(NamedTuple):
    """A model and what it answers, tokens of prompts and of answers."""

    shape: Callable[[bool], Any]
    batch: int
    prompt: int
    new: int


#: With the seconds that a cell takes, the model made.
BATCHES = {
    "6.7B, 24 x 2048 + 2048": Batch(opt_6_7b, 24, 2048, 2048),
    "30B, 1 x 7000 + 1024": Batch(opt_30b, 1, 7000, 1024),
}
SECONDS = {"6.7B, 24 x 2048 + 2048": 20.0, "30B, 1 x 7000 + 1024": 40.0}


def latency_cells(bench: Bench, size: str) -> list[Cell]:
    """The full cache and H2O on one of the models."""
    return [
        Cell("latency", f"{name}, {setting}", partial(measured_latency, bench, batch, SETTINGS[setting]), SECONDS[name])
        for name, batch in BATCHES.items()
        if name.startswith(size)
        for setting in ("full", H2O)
    ]


def measured_latency(bench: Bench, batch: Batch, given: Given) -> Row:
    """Seconds of prompts and of all steps, and what the device's rates allow."""
    shape, n, prompt, new = batch
    steps = STEPS
    if bench.machine.tiny:
        n, prompt, new, steps = min(n, 2), 48, 24, 4
    if (lacking := too_large(bench, shape(bench.machine.tiny), n * (prompt + new))) is not None:
        return {"skipped": lacking}
    model = bench.other_model(shape)
    lengths = [prompt, prompt + new - steps] if given["method"] == "full" else [prompt]
    found = [at_length(bench, model, given, n, length, steps) for length in lengths]
    step_s, held = (statistics.mean(values) for values in list(zip(*found, strict=True))[1:])
    prompt_s = found[0][0]
    latency = prompt_s + new * step_s
    bound_step = (read_weight_bytes(model) + n * held) / bench.rates.copy_bytes_per_s
    bound = n * prompt_flop(model, prompt) / bench.rates.flop_per_s + new * bound_step
    at = " and ".join(f"{length:,}" for length in lengths)
    return {
        "batch": n,
        "prompt": prompt,
        "new": new,
        "latency_s": latency,
        "prompt_s": prompt_s,
        "step_ms": step_s * 1e3,
        "tokens_per_s": n * new / latency,
        "bound_s": bound,
        "ratio": latency / bound,
        "kv_bytes_each": held,
        "peak_gb": bench.machine.peak_bytes() / 1e9,
        "projected": f"{steps} steps behind prompts of {at} tokens",
    }


def at_length(bench: Bench, model: Any, given: Given, n: int, length: int, steps: int) -> tuple[float, float, float]:
    """Seconds of n prompts and of a step behind them, and the bytes that each cache holds."""
    names = [f"{number}" for number in range(n)]
    with bench.engine(given, n, model) as engine:
        read_prompt(engine, "first", bench.prompt(length, n))  # kernels are compiled
        for number, name in enumerate(names):
            add_prompt(engine, name, bench.prompt(length, number), WARM + steps + 8 * n + 8)
        prompt_s = timed(bench.machine, partial(until_all_decode, engine, set(names)))
        for _ in range(WARM):
            step(engine)
        times = [timed(bench.machine, partial(step, engine)) for _ in range(steps)]
        held = engine.stats().kv_bytes / n
    return prompt_s, statistics.mean(times), held


def too_large(bench: Bench, config: Any, tokens: int) -> str | None:
    """Why a model with full caches of so many tokens does not fit on the device; None where it does."""
    if not bench.machine.cuda:
        return None
    room = torch.cuda.get_device_properties(0).total_memory - SPARE_BYTES
    weights, caches = parameter_bytes(config), tokens * kv_token_bytes(config)
    if weights + caches <= room:
        return None
    return (
        f"{weights / 1e9:.1f} GB of weights and {caches / 1e9:.1f} GB of caches are more than the {room / 1e9:.1f} GB "
        "that the device has for them"
    )
