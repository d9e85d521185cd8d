"""`millpond bench methods`: what each method costs beside snapkv, in prefill and in decoding, in turns in one run.

Every repetition runs all methods once, in shuffled order and on the same prompt, so that a busy machine slows all of
them alike; medians and their ratios are reported. What a method may cost follows from its policy (`Entrant.kind`).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.bench.candidates import TINY, ModelShape, draw_prompts
from millpond.bench.clock import Stopwatch
from millpond.bench.entrant import PLAN_BOUND, Entrant, Reading
from millpond.bench.machine import describe_machine
from millpond.bench.plan_clock import PlanClock
from millpond.hf.compress import compress
from millpond.methods import METHODS
from millpond.policy.policy import Policy

ANCHOR = "snapkv"
WARM_UP = 512  #: tokens of the prompt before the clock runs
#: Settings of methods that by default do what another does: one weight is the same budget for every layer.
SETTINGS: dict[str, dict[str, str]] = {"layer_table": {"table": "3;1"}}


@dataclass(frozen=True)
class Plan:
    """What is measured. methods: (name, options) of each; None: all there are, in their default settings."""

    shape: ModelShape = field(default_factory=lambda: ModelShape(layers=4))
    methods: tuple[tuple[str, dict[str, str]], ...] | None = None
    prompt: int = 4096
    new_tokens: int = 64
    repeats: int = 5
    budget: str = "20%"
    threads: int | None = None
    seed: int = 0


QUICK = Plan(
    shape=TINY,
    prompt=512,
    new_tokens=8,
    repeats=2,
)


def enter(plan: Plan) -> tuple[list[Entrant], list[dict[str, str]]]:
    """Who takes part, the anchor always; and who is left out, with the reason.

    Raises:
        OptionError: a method that was asked for by name cannot be built.
    """
    vocab = plan.shape.vocab
    if plan.methods is not None:
        found = [Entrant.of(name, options, vocab) for name, options in plan.methods]
        if not any((e.name, e.setting) == (ANCHOR, "") for e in found):
            found.insert(0, Entrant.of(ANCHOR, {}, vocab))
        return found, []
    entrants, left_out = [], []
    for name in METHODS.names():
        try:
            entrants.append(Entrant.of(name, SETTINGS.get(name, {}), vocab))
        except Exception as error:  # a method may come from anywhere; the others go on
            left_out.append({"name": name, "reason": str(error)})
    return entrants, left_out


def run(plan: Plan, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure every method; returns what `report` writes.

    Raises:
        OptionError: a method that was asked for by name cannot be built.
    """
    entrants, left_out = enter(plan)
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.threads or threads)
    try:
        model = plan.shape.build(plan.seed)
        machine = describe_machine()
        _turns(plan, model, entrants, progress)
    finally:
        torch.set_num_threads(threads)
    anchor = next(e for e in entrants if (e.name, e.setting) == (ANCHOR, ""))
    return {
        "benchmark": "methods",
        "machine": machine.as_dict(),
        "hardware": machine.hardware,
        "software": machine.software,
        "model": {**plan.shape.config(), "parameters": model.num_parameters(), "dtype": "bfloat16"},
        "prompt": plan.prompt, "new_tokens": plan.new_tokens, "repeats": plan.repeats, "budget": plan.budget,
        "seed": plan.seed, "anchor": ANCHOR, "plan_bound": PLAN_BOUND,
        "results": [entrant.as_dict(anchor) for entrant in entrants],
        "left_out": left_out,
    }  # fmt: skip


def _turns(plan: Plan, model: PreTrainedModel, entrants: Sequence[Entrant], progress: Callable[[str], None]) -> None:
    rng = random.Random(plan.seed)
    warm_up = draw_prompts(plan.shape, 1, min(plan.prompt, WARM_UP), plan.seed)
    for entrant in entrants:
        progress(f"warming up: {entrant.name} {entrant.setting}")
        with suppress(Exception):  # the first turn tells
            measure(model, entrant.policy, warm_up, 4, plan.budget)
    for turn in range(plan.repeats):
        prompt = draw_prompts(plan.shape, 1, plan.prompt, plan.seed + turn)
        for entrant in rng.sample(list(entrants), len(entrants)):
            progress(f"turn {turn + 1} of {plan.repeats}: {entrant.name} {entrant.setting}")
            _take(entrant, model, prompt, plan)


def _take(entrant: Entrant, model: PreTrainedModel, prompt: Tensor, plan: Plan) -> None:
    """One reading. A method that fails is reported with its reason and not run again."""
    if entrant.failure:
        return
    try:
        entrant.readings.append(measure(model, entrant.policy, prompt, plan.new_tokens, plan.budget))
    except Exception as error:  # a method may come from anywhere; the others go on
        entrant.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        entrant.readings.clear()


@torch.inference_mode()
def measure(model: Any, policy: Policy, prompt: Tensor, new_tokens: int, budget: str) -> Reading:
    """Unmodified generate() under one policy."""
    with compress(model, policy, budget if policy.takes_budget else None) as cache:
        watch = Stopwatch()
        with PlanClock(model, cache, watch) as clock:
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, streamer=watch,
                do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens, disable_compile=True,
            )  # fmt: skip
        kv_bytes = cache.stats().kv_bytes
    steps = [watch.steps[0] - clock.late_s, *watch.steps[1:]]
    decode_ms = 1e3 * step_s(steps, max(policy.merge_every, policy.rivals.every))
    return Reading(watch.prefill_s + clock.late_s, clock.plan_s, decode_ms, kv_bytes, clock.passes)


def step_s(steps: Sequence[float], period: int) -> float:
    """Seconds of a decoding step: the median, of the mean of `period` steps where that many share some work."""
    period = max(1, min(period, len(steps)))
    return statistics.median(
        statistics.fmean(steps[begin : begin + period]) for begin in range(0, len(steps) - period + 1, period)
    )
