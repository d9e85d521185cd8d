"""The schedules zigzag and diagonal in turns: full caches in memory, weights read from the disk in every step.

    python benchmarks/performance/diagonal.py --folder DIR --memory 192MiB --json diagonal.json

Makes a random Llama in the folder. All requests are there at once, several fillings of the memory; each has its own
prompt. A round runs both schedules in an order that turns from round to round. The ratio is the tokens per second of
diagonal by those of zigzag: the median of rounds and its interval by the bootstrap. The aim is 1.25 where weights bound
the step and answers are at least as long as prompts, and half the mean time to an answer's end.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

from script import begin, interval, keep

from millpond.engine.config import EngineConfig
from millpond.engine.diagonal_schedule import FILLINGS
from millpond.engine.engine import Engine
from millpond.engine.offload.open import open_in_memory
from millpond.engine.offload.plan import Plan, Schedule
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond_lab.bench.generate.candidates import ModelShape

SCHEDULES: tuple[Schedule, ...] = ("zigzag", "diagonal")


def run(folder: Path, args: argparse.Namespace, shape: ModelShape, schedule: Schedule) -> dict[str, Any]:
    """One run of all requests."""
    plan = Plan(weights={"disk": 1.0}, ends="disk", schedule=schedule, prompt_rows=args.prompt_rows)
    config = EngineConfig(method="full", max_running=args.requests)
    opened = open_in_memory(folder, args.memory, plan, None, config)
    engine = Engine(opened.model, None, opened.config, streamed=opened.streamed, tier=opened.tier)
    params = SamplingParams(max_tokens=args.new, temperature=0, ignore_eos=True)
    draw = random.Random(0)
    for n in range(args.requests):
        prompt = tuple(draw.choices(range(shape.vocab), k=args.prompt))
        engine.add(Request(request_id=str(n), prompt=prompt, params=params))
    began, ends, running, steps, new = perf_counter(), [], [], 0, 0
    while engine.busy:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.finished:
                ends.append(perf_counter() - began)
                new += len(output.completions[0].token_ids)
        running.append(engine.stats().running)
        steps += 1
    seconds = perf_counter() - began
    preempted = engine.stats().preemptions
    engine.close()
    return {
        "schedule": schedule,
        "seconds": seconds,
        "tokens_per_s": new / seconds,
        "mean_end_s": statistics.mean(ends),
        "steps": steps,
        "mean_running": statistics.mean(running),
        "most_running": max(running),
        "preemptions": preempted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--memory", default="192MiB")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--prompt-rows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args, shape = begin(parser)
    folder = args.folder / "model"
    if not folder.exists():
        shape.build().save_pretrained(folder)
    rounds = []
    for n in range(args.rounds):
        found = {one: run(folder, args, shape, one) for one in (SCHEDULES if n % 2 else SCHEDULES[::-1])}
        most = found["zigzag"]["most_running"]
        if FILLINGS * most > args.requests:
            raise SystemExit(f"{most} run together: give at least {FILLINGS * most} --requests, or less --memory")
        rounds.append(found)
        for one in SCHEDULES:
            print(f"round {n}, {one}: " + ", ".join(f"{k} {v:.4g}" for k, v in found[one].items() if k != "schedule"))
    ratios = [found["diagonal"]["tokens_per_s"] / found["zigzag"]["tokens_per_s"] for found in rounds]
    ends = [found["diagonal"]["mean_end_s"] / found["zigzag"]["mean_end_s"] for found in rounds]
    low, high = interval(ratios)
    print(f"diagonal by zigzag: tokens per second {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
    print(f"mean time to an answer's end: {statistics.median(ends):.3f}")
    args.folder = args.folder.name
    keep(args, rounds, ratio=statistics.median(ratios), interval=(low, high), mean_end=statistics.median(ends))


if __name__ == "__main__":
    main()
