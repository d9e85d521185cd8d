"""`bench batch`: seeded prompts that part on several levels, their runs under several orders, and the report."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch

from millpond.engine.batch_plan import plan_batch
from millpond.engine.llm import LLM
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import OptionError
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table, model_phrase
from millpond_lab.bench.generate.candidates import ModelShape


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """How many texts follow each text of the level before, and how many tokens each has."""

    count: int
    tokens: int


def parse_tree(text: str) -> list[TreeLevel]:
    """Levels as COUNTxTOKENS, separated by commas.

    Raises:
        OptionError: not that, or a number below 1.

    Example:
        >>> parse_tree("2x220,6x50")
        [TreeLevel(count=2, tokens=220), TreeLevel(count=6, tokens=50)]
    """
    levels = []
    for part in text.split(","):
        count, _, tokens = part.partition("x")
        if not (count.isdecimal() and tokens.isdecimal() and int(count) > 0 and int(tokens) > 0):
            raise OptionError(f"{part!r} in {text!r} must be COUNTxTOKENS, such as 6x260")
        levels.append(TreeLevel(int(count), int(tokens)))
    return levels


def tree_prompts(levels: list[TreeLevel], vocab: int, seed: int) -> list[tuple[int, ...]]:
    """All prompts of a tree, in random order; ids are 1 to vocab - 1."""
    rng = np.random.default_rng(seed)
    texts: dict[tuple[int, ...], list[int]] = {}

    def text(place: tuple[int, ...]) -> list[int]:
        if place not in texts:
            texts[place] = rng.integers(1, vocab, levels[len(place) - 1].tokens).tolist()
        return texts[place]

    prompts = [
        tuple(token for depth in range(1, len(place) + 1) for token in text(place[:depth]))
        for place in product(*(range(level.count) for level in levels))
    ]
    return [prompts[number] for number in rng.permutation(len(prompts))]


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
    found: dict[str, BatchRun] = {}
    budget = None if method == "full" else plan.budget
    for repeat in range(plan.repeats):
        for order in ORDERS[repeat % len(ORDERS) :] + ORDERS[: repeat % len(ORDERS)]:
            tell(f"{method}, {order}, repetition {repeat + 1} of {plan.repeats}")
            asked = sorted(prompts) if order == "sorted" else prompts
            lengths = [plan.new_tokens] * len(prompts)
            found[order] = once(model, asked, lengths, order, method=method, budget=budget, kv_memory=plan.kv_memory)
            seconds[order].append(found[order].seconds)
    tokens = sum(map(len, prompts))
    return [
        OrderTiming(
            method,
            order,
            1 - found[order].read / tokens,
            found[order].preemptions,
            tuple(seconds[order]),
            found[order].answers == found["arrival"].answers,
        )
        for order in ORDERS
    ]


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One run of all prompts.

    Attributes:
        seconds, cpu_seconds: until the last answer, by the clock and of the processor. read: tokens of prompts that
            were computed. answers: to each prompt.
    """

    seconds: float
    cpu_seconds: float
    read: int
    preemptions: int
    answers: dict[tuple[int, ...], tuple[int, ...]]


def once(
    model: Any, prompts: Sequence[tuple[int, ...]], new_tokens: Sequence[int], order: str, **settings: Any
) -> BatchRun:
    """Run prompts on a new engine with a prefix cache.

    Args:
        new_tokens: of each answer. order: one of `ORDERS`; "arrival" and "sorted" take the prompts as they come.
        settings: of the engine.
    """
    params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in new_tokens]
    with LLM(model, prefix_cache=True, **settings) as llm:
        began, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            outputs = llm.generate(list(prompts), params, schedule="batch" if order == "batch" else "arrival")
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        stats = llm.stats()
    answers = {out.prompt_token_ids: out.completions[0].token_ids for out in outputs}
    return BatchRun(took, cpu, stats.prompt_tokens, stats.preemptions, answers)


def median_seconds(row: dict[str, Any]) -> float:
    """Of the repetitions of one order."""
    return float(statistics.median(row["seconds"]))


_HEAD = ("method, order", "spared", "preempted", "seconds", "x batch (least to most)", "tokens of arrival")


def markdown(data: dict[str, Any]) -> str:
    """One row per method and order; ratios are those of runs of the same repetition."""
    plan = data["plan"]
    tree = ", ".join(f"{count} x {tokens}" for count, tokens in plan["tree"])
    limit = "no limit of KV memory" if plan["kv_memory"] is None else f"{plan['kv_memory']} of KV memory"
    rows = [_row(data, row) for row in data["results"]]
    return "\n".join(
        [
            "# Batches of prompts that begin alike\n",
            f"{data['hardware']}; {data['software']}.\n",
            f"`{data['command']}`\n" if "command" in data else "",
            f"{model_phrase(data['model'])}, {data['model']['parameters'] / 1e6:.3g}M parameters; "
            f"{data['prompts']} prompts in random order, texts per level x tokens: {tree}; {data['tokens']:,} tokens, "
            f"of which {data['distinct']:,} differ ({data['best']:.1%} could be spared); "
            f"{plan['new_tokens']} new tokens; {limit}; budget {plan['budget']} "
            f"but for full; medians of {plan['repeats']} repetitions in turns.\n",
            markdown_table(_HEAD, rows),
        ]
    )


def _row(data: dict[str, Any], row: dict[str, Any]) -> list[str]:
    times = ratios(data, row["method"], row["order"])
    ratio = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
    return [
        f"{row['method']}, {row['order']}",
        f"{row['spared']:.1%}",
        str(row["preemptions"]),
        f"{median_seconds(row):.2f}",
        ratio,
        "yes" if row["alike"] else "no",
    ]
