"""`millpond bench methods`: what each method costs beside snapkv, in prefill and in decoding, in turns in one run.

Every repetition runs all methods once, in shuffled order and on the same prompt. A few of them and snapkv hold their
caches at once and decode in turns, some steps each, so that a busy machine slows all of them alike and a step is
compared with those of snapkv right beside it. What a method may cost follows from its policy (`Entrant.kind`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.bench.candidates import TINY, ModelShape, draw_prompts
from millpond.bench.course import Course
from millpond.bench.entrant import PLAN_BOUND, Entrant
from millpond.bench.machine import describe_machine
from millpond.methods import METHODS

ANCHOR = "snapkv"
WARM_UP = 512  #: tokens of the prompt before the clock runs
ROUND = 8  #: decoding steps of one method before the next has its turn
HEAT = 6  #: methods that decode in turns beside the anchor
#: Settings of methods that by default do what another does: one weight is the same budget for every layer.
SETTINGS: dict[str, dict[str, str]] = {"layer_table": {"table": "3;1"}}


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        methods: (name, options) of each; None: all there are, in their default settings.
        new_tokens: decoding steps that are timed, in whole rounds.
    """

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
        if not any(_is_anchor(e) for e in found):
            found.insert(0, Entrant.of(ANCHOR, {}, vocab))
        return found, []
    entrants, left_out = [], []
    for name in METHODS.names():
        try:
            entrants.append(Entrant.of(name, SETTINGS.get(name, {}), vocab))
        except Exception as error:  # a method may come from anywhere; the others go on
            left_out.append({"name": name, "reason": str(error)})
    return entrants, left_out


def _is_anchor(entrant: Entrant) -> bool:
    return (entrant.name, entrant.setting) == (ANCHOR, "")


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
    anchor = next(filter(_is_anchor, entrants))
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
        with suppress(Exception), Course(model, entrant.policy, warm_up, plan.budget) as course:  # the first turn tells
            course.prefill()
            course.go_on(1)
    anchor = next(filter(_is_anchor, entrants))
    others = [e for e in entrants if e is not anchor]
    for turn in range(plan.repeats):
        prompt = draw_prompts(plan.shape, 1, plan.prompt, plan.seed + turn)
        order = rng.sample(others, len(others))
        for first in range(0, max(len(order), 1), HEAT):
            chosen = [anchor, *order[first : first + HEAT]]
            progress(f"turn {turn + 1} of {plan.repeats}: {', '.join(e.name for e in chosen)}")
            _heat(plan, model, prompt, anchor, rng.sample(chosen, len(chosen)), rng)


def _heat(
    plan: Plan, model: PreTrainedModel, prompt: Tensor, anchor: Entrant, chosen: Sequence[Entrant], rng: random.Random
) -> None:
    """One reading of each. Prompts one after the other, then decoding in turns, a round each.

    A method that fails is reported with its reason and not run again.
    """
    with ExitStack() as stack:
        courses = {id(e): Course(model, e.policy, prompt, plan.budget) for e in chosen}

        def begin(entrant: Entrant) -> None:
            stack.enter_context(courses[id(entrant)]).prefill()

        def go_on(entrant: Entrant) -> None:
            courses[id(entrant)].go_on(min(ROUND, plan.new_tokens))

        for entrant in chosen:
            _attempt(entrant, begin)
        for _ in range(-(-plan.new_tokens // ROUND)):
            for entrant in rng.sample(chosen, len(chosen)):
                _attempt(entrant, go_on)
        beside = None if anchor.failure else courses[id(anchor)].decode_ms
        for entrant in chosen:
            _attempt(entrant, lambda e: e.readings.append(courses[id(e)].reading(beside)))


def _attempt(entrant: Entrant, act: Callable[[Entrant], None]) -> None:
    """Do something for an entrant that has not failed yet; if it fails now, that is its result."""
    if entrant.failure:
        return
    try:
        act(entrant)
    except Exception as error:  # a method may come from anywhere; the others go on
        entrant.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        entrant.readings.clear()
