"""Runs of one batch of prompts under several orders, in turns, on one model and inside one limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from millpond.engine.batch_plan import plan_batch
from millpond.engine.llm import LLM
from millpond.engine.sampling.params import SamplingParams
from millpond_lab.bench.batch.prompts import TreeLevel, tree_prompts
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.generate.candidates import ModelShape

#: What is compared: in random order with a prefix cache (as vLLM runs a list of prompts: first come first served, the
#: longest unused blocks evicted), sorted with the same, and planned.
ORDERS = ("arrival", "sorted", "batch")


@dataclass(frozen=True, slots=True)
class BatchBench:
    """What is run; see `millpond bench batch`."""

    tree: tuple[TreeLevel, ...]
    methods: tuple[str, ...] = ("full",)
    budget: str = "20%"
    kv_memory: str | None = None
    new_tokens: int = 16
    repeats: int = 3
    seed: int = 0
    shape: ModelShape = field(default_factory=ModelShape)


@dataclass(frozen=True, slots=True)
class OrderTiming:
    """One order under one method; seconds: of each repetition. alike: its tokens are those of "arrival"."""

    method: str
    order: str
    spared: float
    preemptions: int
    seconds: tuple[float, ...]
    alike: bool


def run(plan: BatchBench, tell: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Every method and order, as the fields of a report."""
    prompts = tree_prompts(list(plan.tree), plan.shape.vocab, plan.seed)
    model = plan.shape.build(plan.seed)
    rows = [row for method in plan.methods for row in _method(plan, model, method, prompts, tell)]
    planned = plan_batch(prompts)
    parameters = sum(weight.numel() for weight in model.parameters())
    return {
        **describe_machine().header("batch"),
        "model": {**plan.shape.config(), "parameters": parameters},
        "prompts": len(prompts),
        "tokens": planned.tokens,
        "distinct": planned.least,
        "best": 1 - planned.least / planned.tokens,
        "plan": {**asdict(plan), "shape": None, "tree": [[level.count, level.tokens] for level in plan.tree]},
        "results": [asdict(row) for row in rows],
    }


def ratios(data: dict[str, Any], method: str, order: str) -> list[float]:
    """Of each repetition: how many times as long another order takes as the planned batch."""
    seconds = {row["order"]: row["seconds"] for row in data["results"] if row["method"] == method}
    return [other / planned for other, planned in zip(seconds[order], seconds["batch"], strict=True)]


def _method(
    plan: BatchBench, model: Any, method: str, prompts: Sequence[tuple[int, ...]], tell: Callable[[str], None]
) -> list[OrderTiming]:
    seconds: dict[str, list[float]] = {order: [] for order in ORDERS}
    found: dict[str, tuple[float, int, dict[tuple[int, ...], tuple[int, ...]]]] = {}
    for repeat in range(plan.repeats):
        for order in ORDERS[repeat % len(ORDERS) :] + ORDERS[: repeat % len(ORDERS)]:
            tell(f"{method}, {order}, repetition {repeat + 1} of {plan.repeats}")
            took, spared, preempted, answers = _once(
                plan, model, method, sorted(prompts) if order == "sorted" else prompts, order
            )
            seconds[order].append(took)
            found[order] = spared, preempted, answers
    return [
        OrderTiming(
            method,
            order,
            found[order][0],
            found[order][1],
            tuple(seconds[order]),
            found[order][2] == found["arrival"][2],
        )
        for order in ORDERS
    ]


def _once(
    plan: BatchBench, model: Any, method: str, prompts: Sequence[tuple[int, ...]], order: str
) -> tuple[float, float, int, dict[tuple[int, ...], tuple[int, ...]]]:
    """Seconds, share of the prompts' tokens that were not read, preemptions, and the answer to each prompt."""
    budget = None if method == "full" else plan.budget
    with LLM(model, method=method, budget=budget, kv_memory=plan.kv_memory, prefix_cache=True) as llm:
        began = time.perf_counter()
        with torch.no_grad():
            outputs = llm.generate(
                list(prompts),
                SamplingParams(max_tokens=plan.new_tokens, temperature=0, ignore_eos=True),
                schedule="batch" if order == "batch" else "arrival",
            )
        took = time.perf_counter() - began
        stats = llm.stats()
    spared = 1 - stats.prompt_tokens / sum(map(len, prompts))
    return took, spared, stats.preemptions, {out.prompt_token_ids: out.completions[0].token_ids for out in outputs}


def median_seconds(row: dict[str, Any]) -> float:
    """Of the repetitions of one order."""
    return float(statistics.median(row["seconds"]))
