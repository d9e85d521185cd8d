"""What a cluster adds to the engine: one replica, and a split, against the engine in the same process.

    python benchmarks/performance/cluster_overhead.py --threads 1 --rounds 7 --json overhead.json

Each layout has the same closed load in turns: `--users` requests in flight, without HTTP, through the stream of
`AsyncLLM` ("alone") and of `cluster.AsyncLLM` ("replica", "split"). Every round has prompts of its own, and ratios and
differences are between runs of one round. All processes live at the same time, and only one of them has work; a split
has two that do, on the cores of this machine. The model is the random Llama of `millpond bench generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from script import begin, interval, keep

import millpond as mp
from millpond.engine.request import Request
from millpond_lab.bench.common.report import markdown_table
from millpond_lab.bench.generate.candidates import draw_prompts

LAYOUTS: dict[str, dict[str, int]] = {"replica": {"replicas": 1}, "split": {"prefill": 1, "decode": 1}}


@dataclass(frozen=True)
class Run:
    """One load of one layout: answers' tokens per second of the whole load, and medians over its requests."""

    round: int
    layout: str
    tokens_per_s: float
    ttft_s: float
    e2e_s: float


@dataclass(frozen=True)
class Overhead:
    """A layout against the engine alone: median over rounds, and the 95 % interval of the median."""

    layout: str
    rate: tuple[float, float, float]
    ttft_more_ms: tuple[float, float, float]
    e2e_more_ms: tuple[float, float, float]


async def load(llm: Any, prompts: Sequence[tuple[int, ...]], users: int, new: int) -> tuple[float, float, float]:
    """Answer all prompts, `users` at a time; tokens per second, and the median times in seconds."""
    params = mp.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    left = iter(enumerate(prompts))
    firsts, wholes = list[float](), list[float]()

    async def user() -> None:
        for number, ids in left:
            began, first = time.perf_counter(), None
            async for output in llm.stream(Request(request_id=str(number), prompt=ids, params=params)):
                if first is None and output.completions[0].token_ids:
                    first = time.perf_counter() - began
            assert first is not None, "there was an answer"
            firsts.append(first)
            wholes.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(users)))
    seconds = time.perf_counter() - began
    return new * len(prompts) / seconds, statistics.median(firsts), statistics.median(wholes)


def compared(layout: str, runs: Sequence[Run]) -> Overhead:
    """The runs of a layout against those of the engine alone, round by round."""
    alone = {run.round: run for run in runs if run.layout == "alone"}
    here = [run for run in runs if run.layout == layout]

    def spread(values: list[float]) -> tuple[float, float, float]:
        return (statistics.median(values), *interval(values))

    return Overhead(
        layout,
        spread([run.tokens_per_s / alone[run.round].tokens_per_s for run in here]),
        spread([1e3 * (run.ttft_s - alone[run.round].ttft_s) for run in here]),
        spread([1e3 * (run.e2e_s - alone[run.round].e2e_s) for run in here]),
    )


def shown(values: tuple[float, float, float], digits: int) -> str:
    """Median [low, high]."""
    return "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(*values, d=digits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--method", default="h2o")
    parser.add_argument("--budget", default="20%")
    args, shape = begin(parser)
    options: dict[str, Any] = {"method": args.method, "threads": args.threads}
    if args.method != "full":
        options["budget"] = args.budget
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        shape.build().save_pretrained(folder)
        layouts: dict[str, Any] = {"alone": mp.AsyncLLM(folder, **options)}
        try:
            for name in args.layouts:
                layouts[name] = mp.cluster.AsyncLLM(folder, **LAYOUTS[name], **options)
            for turn in range(args.rounds + 1):
                order = list(layouts)
                order = order[turn % len(order) :] + order[: turn % len(order)]
                prompts = [tuple(ids) for ids in draw_prompts(shape, args.requests, args.prompt, seed=turn).tolist()]
                for name in order:
                    run = Run(turn, name, *asyncio.run(load(layouts[name], prompts, args.users, args.new)))
                    print(run, flush=True)
                    if turn:  # the first one only warms up
                        runs.append(run)
            moves = {name: asdict(layouts[name].figures()) for name in args.layouts}
        finally:
            for llm in layouts.values():
                asyncio.run(llm.close())
    found = [compared(name, runs) for name in args.layouts]
    rows = [(one.layout, shown(one.rate, 3), shown(one.ttft_more_ms, 1), shown(one.e2e_more_ms, 1)) for one in found]
    print(
        markdown_table(
            ("layout", "tokens/s, ratio to the engine", "first token, ms more", "whole answer, ms more"), rows
        )
    )
    for name, figures in moves.items():
        if figures["moved"]:
            each, ms = figures["moved_bytes"] / figures["moved"], 1e3 * figures["move_s"] / figures["moved"]
            print(f"{name}: {figures['moved']} moves of {each:,.0f} bytes, {ms:.1f} ms from offer to arrival")
    keep(args, [asdict(one) for one in found], runs=[asdict(one) for one in runs], moves=moves)


if __name__ == "__main__":
    main()
