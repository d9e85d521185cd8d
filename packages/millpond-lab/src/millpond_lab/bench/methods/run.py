"""`millpond bench methods`: the cost of each method in prefill and decoding compared with snapkv, in turns in one run.

Every repetition runs all methods once, in shuffled order, on the same prompt and with fresh caches. A few of them and
snapkv hold their caches at once and decode in turns of few steps, with a turn of snapkv after every few. A turn is
compared with the turns of snapkv before and after it, a fraction of a second away: the speed of memory on a shared
machine moves by a third from one second to the next. The median over the turns is a reading, the median over the
repetitions the result. snapkv takes part a second time, so that each report says how far two equal candidates differ.
What a method may cost follows from its policy (`MethodCandidate.kind`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from millpond.methods import METHODS
from millpond_lab.bench.common.machine import describe_machine, torch_threads
from millpond_lab.bench.generate.candidates import TINY, ModelShape, draw_prompts
from millpond_lab.bench.methods.candidate import PLAN_BOUND, MethodCandidate
from millpond_lab.bench.methods.timed_run import TimedRun, period_of

T = TypeVar("T")

ANCHOR = "snapkv"
WARM_UP = 512  #: tokens of the prompt before the clock runs
TURN = 4  #: decoding steps of one method before the next has its turn
TURNS = 3  #: at least, of a method whose turns are long
HEAT = 6  #: methods that decode in turns with the anchor
GROUP = 3  #: of these, between two turns of the anchor
#: Settings of methods that by default do what another does: one weight is the same budget for every layer.
SETTINGS: dict[str, dict[str, str]] = {"layer_table": {"table": "3;1"}}


@dataclass(frozen=True)
class MethodsPlan:
    """What is measured.

    Attributes:
        methods: (name, options) of each; None: all there are, in their default settings.
        new_tokens: decoding steps that are timed in each repetition, in whole turns.
    """

    shape: ModelShape = field(default_factory=lambda: ModelShape(layers=4))
    methods: tuple[tuple[str, dict[str, str]], ...] | None = None
    prompt: int = 4096
    new_tokens: int = 64
    repeats: int = 4
    budget: str = "20%"
    threads: int | None = None
    seed: int = 0


QUICK = MethodsPlan(shape=TINY, prompt=512, new_tokens=8, repeats=2)


def candidates_of(plan: MethodsPlan) -> tuple[list[MethodCandidate], list[dict[str, str]]]:
    """Who takes part, the anchor always and twice; and who is left out, with the reason.

    Raises:
        OptionError: a method given by name cannot be built.
    """
    vocab = plan.shape.vocab
    if plan.methods is not None:
        found = [MethodCandidate.of(name, options, vocab) for name, options in plan.methods]
        if not any(_is_anchor(e) for e in found):
            found.insert(0, MethodCandidate.of(ANCHOR, {}, vocab))
        return [*found, _once_more(vocab)], []
    candidates, left_out = [], []
    for name in METHODS.names():
        try:
            candidates.append(MethodCandidate.of(name, SETTINGS.get(name, {}), vocab))
        except Exception as error:  # a method may come from anywhere; the others continue
            left_out.append({"name": name, "reason": str(error)})
    return [*candidates, _once_more(vocab)], left_out


def _is_anchor(candidate: MethodCandidate) -> bool:
    return (candidate.name, candidate.setting, candidate.again) == (ANCHOR, "", False)


def _once_more(vocab: int) -> MethodCandidate:
    return replace(MethodCandidate.of(ANCHOR, {}, vocab), again=True)


def run(plan: MethodsPlan, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure every method; returns what `report` writes.

    Raises:
        OptionError: a method given by name cannot be built.
    """
    candidates, left_out = candidates_of(plan)
    with torch_threads(plan.threads):
        model, machine = plan.shape.build(plan.seed), describe_machine()
        for candidate in candidates:
            candidate.take_random_heads(model)
        _turns(plan, model, candidates, progress)
    anchor = next(filter(_is_anchor, candidates))
    return {
        **machine.header("methods"),
        "model": {**plan.shape.config(), "parameters": model.num_parameters(), "dtype": "bfloat16"},
        "prompt": plan.prompt,
        "new_tokens": plan.new_tokens,
        "repeats": plan.repeats,
        "budget": plan.budget,
        "seed": plan.seed,
        "anchor": ANCHOR,
        "plan_bound": PLAN_BOUND,
        "results": [candidate.as_dict(anchor) for candidate in candidates],
        "left_out": left_out,
    }


def _turns(
    plan: MethodsPlan, model: PreTrainedModel, candidates: Sequence[MethodCandidate], progress: Callable[[str], None]
) -> None:
    rng = random.Random(plan.seed)
    warm_up = draw_prompts(plan.shape, 1, min(plan.prompt, WARM_UP), plan.seed)
    for candidate in candidates:
        progress(f"warming up: {candidate.name} {candidate.setting}")
        with (
            suppress(Exception),
            TimedRun(model, candidate.policy, warm_up, plan.budget) as course,
        ):  # the first turn tells
            course.prefill()
            course.decode(1)
    anchor = next(filter(_is_anchor, candidates))
    others = [e for e in candidates if e is not anchor]
    for turn in range(plan.repeats):
        prompt = draw_prompts(plan.shape, 1, plan.prompt, plan.seed + turn)
        order = rng.sample(others, len(others))
        for first in range(0, max(len(order), 1), HEAT):
            chosen = [anchor, *order[first : first + HEAT]]
            progress(f"turn {turn + 1} of {plan.repeats}: {', '.join(e.name for e in chosen)}")
            _heat(plan, model, prompt, anchor, rng.sample(chosen, len(chosen)), rng)


def _heat(
    plan: MethodsPlan,
    model: PreTrainedModel,
    prompt: Tensor,
    anchor: MethodCandidate,
    chosen: Sequence[MethodCandidate],
    rng: random.Random,
) -> None:
    """One reading of each. Prompts one after the other, then decoding in turns.

    A method that fails is reported with its reason and not run again.
    """
    with ExitStack() as stack:
        courses = {id(e): TimedRun(model, e.policy, prompt, plan.budget) for e in chosen}

        def begin(candidate: MethodCandidate) -> None:
            stack.enter_context(courses[id(candidate)]).prefill()

        for candidate in chosen:
            _attempt(candidate, begin)
        ratios = _race(plan, courses, anchor, [e for e in chosen if e is not anchor], rng)
        for candidate in chosen:
            _attempt(candidate, lambda e: e.readings.append(courses[id(e)].reading(ratios[id(e)])))


def _race(
    plan: MethodsPlan,
    courses: dict[int, TimedRun],
    anchor: MethodCandidate,
    others: Sequence[MethodCandidate],
    rng: random.Random,
) -> dict[int, list[float]]:
    """Decode in turns; the ratio of each turn to the mean of those of the anchor before and after it, by candidate."""
    steps = min(TURN, plan.new_tokens)
    rounds = max(TURNS, -(-plan.new_tokens // steps))
    due = {id(e): _rounds(period_of(e.policy), steps, rounds, rng) for e in others}
    ratios: dict[int, list[float]] = {id(e): [] for e in others}

    def go_on(candidate: MethodCandidate) -> float | None:
        return _attempt(candidate, lambda e: courses[id(e)].decode(steps))

    before = go_on(anchor)
    for number in range(rounds):
        now = [e for e in others if number in due[id(e)]]
        rng.shuffle(now)
        for first in range(0, max(len(now), 1), GROUP):
            took = [(e, go_on(e)) for e in now[first : first + GROUP]]
            behind = go_on(anchor)
            if before is not None and behind is not None:
                for candidate, ms in took:
                    if ms is not None:
                        ratios[id(candidate)].append(2 * ms / (before + behind))
            before = behind
    return {**ratios, id(anchor): [1.0] if before is not None else []}


def _rounds(period: int, steps: int, rounds: int, rng: random.Random) -> set[int]:
    """In which rounds a method takes a turn: in fewer where what it does every `period` steps makes its turns long."""
    turns = max(TURNS, rounds * steps // max(steps, period))
    return set(rng.sample(range(rounds), min(turns, rounds)))


def _attempt(candidate: MethodCandidate, act: Callable[[MethodCandidate], T]) -> T | None:
    """Do something for a candidate that has not failed yet; if it fails now, that is its result, and here None."""
    if candidate.failure:
        return None
    try:
        return act(candidate)
    except Exception as error:  # a method may come from anywhere; the others continue
        candidate.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        candidate.readings.clear()
        return None
