"""`millpond bench generate`: unmodified generate() under our caches and under those of others, in turns.

Every repetition runs all candidates once, in shuffled order, so that a busy machine slows all of them alike;
medians and ratios are reported. Peers that need other versions of their libraries run in a process of their own,
one request at a time, inside the same turns.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.budget import Budget
from millpond_lab.bench.common.machine import describe_machine, torch_threads
from millpond_lab.bench.common.optional_peer import OptionalPeer
from millpond_lab.bench.generate.candidates import (
    TINY,
    BenchModel,
    GenerateCandidate,
    GenerateTiming,
    ModelShape,
    default_candidates,
    draw_prompts,
)


@dataclass(frozen=True)
class GeneratePlan:
    """What is measured."""

    shape: BenchModel = field(default_factory=ModelShape)
    cells: tuple[tuple[int, int], ...] = ((1, 2048), (1, 4096), (4, 2048))  # (batch, prompt)
    new_tokens: int = 64
    repeats: int = 5
    budget: str = "20%"
    threads: int | None = None
    seed: int = 0


QUICK = GeneratePlan(shape=TINY, cells=((1, 256), (2, 192)), new_tokens=8, repeats=2)


PRESSES = ("SnapKV", "ObservedAttention", "AdaKV(SnapKV)")


class KVPress(OptionalPeer):
    """A running child with kvpress, or the reason why there is none."""

    def __init__(self, python: Path, script: Path) -> None:
        super().__init__("kvpress", python, script, made_by="benchmarks/peers/kvpress_env.sh")

    def candidates(self, plan: GeneratePlan) -> list[GenerateCandidate]:
        """Its presses at the plan's budget, and its own full cache; none if it does not run."""
        if not self.running:
            return []
        setup = {"config": plan.shape.config(), "seed": plan.seed, "threads": plan.threads}
        ratio = 1 - float(Budget.parse(plan.budget).amount)
        full = GenerateCandidate("kvpress, no press", "sdpa", self._runner(setup, "none", 0.0))
        return [full, *(GenerateCandidate(f"kvpress {p}", plan.budget, self._runner(setup, p, ratio)) for p in PRESSES)]

    def _runner(self, setup: dict[str, Any], press: str, ratio: float) -> Any:
        def run(model: PreTrainedModel, prompts: Tensor, new_tokens: int) -> GenerateTiming:
            request = {**setup, "press": press, "ratio": ratio, "prompts": prompts.tolist(), "new_tokens": new_tokens}
            return GenerateTiming(**self.ask(request))

        return run


WARM_UP = 256  #: tokens of the prompts before the clock runs
ANCHOR = "transformers DynamicCache"


@dataclass
class GenerateResult:
    """All readings of one candidate in one cell."""

    name: str
    setting: str
    batch: int
    prompt: int
    readings: list[GenerateTiming] = field(default_factory=list)
    failure: str = ""

    def median(self, field_name: str) -> float | None:
        """The median of one number over the repetitions."""
        values = [getattr(reading, field_name) for reading in self.readings]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the medians and every reading."""
        fields = ("prefill_s", "decode_ms", "kv_bytes", "peak_bytes")
        return {
            "name": self.name,
            "setting": self.setting,
            "batch": self.batch,
            "prompt": self.prompt,
            **{name: self.median(name) for name in fields},
            "readings": [{name: getattr(reading, name) for name in fields} for reading in self.readings],
            **({"failure": self.failure} if self.failure else {}),
        }


def run(
    plan: GeneratePlan,
    candidates: Sequence[GenerateCandidate] | None = None,
    peer: KVPress | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure every candidate in every cell; returns what `report` writes."""
    everyone = list(default_candidates(plan.budget) if candidates is None else candidates)
    if peer is not None:
        everyone += peer.candidates(plan)
    with torch_threads(plan.threads):
        model, machine = plan.shape.build(plan.seed), describe_machine()
        results = [r for cell in plan.cells for r in _cell(plan, model, everyone, *cell, progress)]
    return {
        **machine.header("generate"),
        "model": {**plan.shape.config(), "parameters": model.num_parameters(), "dtype": "bfloat16"},
        "new_tokens": plan.new_tokens,
        "repeats": plan.repeats,
        "budget": plan.budget,
        "seed": plan.seed,
        "anchor": ANCHOR,
        "peer": peer.note if peer is not None else "kvpress was not requested",
        "results": [result.as_dict() for result in results],
    }


def _cell(
    plan: GeneratePlan,
    model: PreTrainedModel,
    candidates: Sequence[GenerateCandidate],
    batch: int,
    length: int,
    progress: Callable[[str], None],
) -> list[GenerateResult]:
    results = {c: GenerateResult(c.name, c.setting, batch, length) for c in candidates}
    rng = random.Random(plan.seed)
    warm_up = draw_prompts(plan.shape, batch, min(length, WARM_UP), plan.seed)
    for turn in range(-1, plan.repeats):
        prompts = warm_up if turn < 0 else draw_prompts(plan.shape, batch, length, plan.seed + turn)
        for candidate in rng.sample(list(candidates), len(candidates)):
            where = f"batch {batch}, prompt {length}, turn {turn + 1} of {plan.repeats}"
            progress(f"{where}: {candidate.name} {candidate.setting}")
            _take(results[candidate], candidate, model, prompts, 4 if turn < 0 else plan.new_tokens, keep=turn >= 0)
    return list(results.values())


def _take(
    result: GenerateResult,
    candidate: GenerateCandidate,
    model: PreTrainedModel,
    prompts: torch.Tensor,
    new_tokens: int,
    *,
    keep: bool,
) -> None:
    """One reading. A candidate that fails is reported with its reason and not run again in this cell."""
    if result.failure:
        return
    try:
        with torch.inference_mode():
            reading = candidate.run(model, prompts, new_tokens)
    except Exception as error:  # a peer may fail in any way; the others continue
        result.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return
    if keep:
        result.readings.append(reading)
