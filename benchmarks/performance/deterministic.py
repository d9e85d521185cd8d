"""What `deterministic=True` costs: prompts and decoding steps with it and without, in turns.

    python benchmarks/performance/deterministic.py --model smollm2-135m --cells 1x1024,8x512,40x128 \
        --repeats 5 --json deterministic.json

Each cell is a batch of prompts of random ids, all added at once. `prompts` is the time until the last of them has its
first token, `step` the median of the steps in which nothing is read. A ratio is the median over the turns of the time
with it over the time without.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import asdict, dataclass

from script import begin, keep

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.scheduler import Step
from millpond.models.load import load_model
from millpond_lab.bench.common.report import markdown_table


@dataclass(frozen=True)
class Cost:
    """Medians in milliseconds without and with it, and the ratios with their lowest and highest turn."""

    dtype: str
    batch: int
    prompt: int
    prompts_ms: tuple[float, float]
    prompts_ratio: tuple[float, float, float]
    step_ms: tuple[float, float]
    step_ratio: tuple[float, float, float]


def turn(engine: Engine, batch: int, length: int, new: int, seed: int) -> tuple[float, float]:
    """Seconds of the prompts and of a decoding step."""
    draw, steps = random.Random(seed), []

    def watch(step: Step, seconds: float) -> None:
        if not step.prefills:
            steps.append(seconds)

    engine.on_step = watch
    for number in range(batch):
        ids = tuple(draw.randrange(2, engine.vocab_size) for _ in range(length))
        params = mp.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt=ids, params=params))
    begun = time.monotonic()
    outputs = engine.drain()
    first = max(output.times.first_token or begun for output in outputs)
    return first - begun, statistics.median(steps)


def spread(ratios: list[float]) -> tuple[float, float, float]:
    """Median, lowest and highest."""
    return statistics.median(ratios), min(ratios), max(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtypes", default="bf16,f32")
    parser.add_argument("--cells", default="1x1024,8x512,40x128")
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--method", default="full")
    args, _ = begin(parser)
    found = []
    for dtype in args.dtypes.split(","):
        model = load_model(args.model, dtype)
        for cell in args.cells.split(","):
            batch, length = map(int, cell.split("x"))
            engines = [Engine(model, method=args.method, deterministic=on) for on in (False, True)]
            turns: list[list[tuple[float, float]]] = [[], []]
            for number in range(args.repeats + 1):
                for on in (0, 1) if number % 2 else (1, 0):
                    took = turn(engines[on], batch, length, args.new, number)
                    if number:  # the first one only warms up
                        turns[on].append(took)
            for engine in engines:
                engine.close()
            (plain, fixed) = turns
            parts = []
            for part in (0, 1):
                ms = tuple(statistics.median(t[part] for t in side) * 1e3 for side in turns)
                parts += [ms, spread([b[part] / a[part] for a, b in zip(plain, fixed, strict=True)])]
            found.append(Cost(dtype, batch, length, *parts))
            print(found[-1], flush=True)
    rows = [
        (
            c.dtype,
            f"{c.batch} x {c.prompt}",
            f"{c.prompts_ms[0]:.0f}",
            f"{c.prompts_ms[1]:.0f}",
            shown(c.prompts_ratio),
            f"{c.step_ms[0]:.1f}",
            f"{c.step_ms[1]:.1f}",
            shown(c.step_ratio),
        )
        for c in found
    ]
    head = ("numbers", "batch x prompt", "prompts ms", "with", "ratio", "step ms", "with", "ratio")
    print(markdown_table(head, rows))
    keep(args, [asdict(one) for one in found])


def shown(ratio: tuple[float, float, float]) -> str:
    """Median [lowest, highest]."""
    return f"{ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]"


if __name__ == "__main__":
    main()
