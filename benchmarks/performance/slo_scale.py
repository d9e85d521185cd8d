"""How much tighter the latency limits can be, and how much higher the rate, with prompts apart from answers: simulated.

    python benchmarks/performance/slo_scale.py --traces FOLDER [--json benchmarks/results/slo-scale.json]

OPT on A100 with the step times that DistServe's authors published; nothing is measured. A row is a load, a layout and a
seed of lengths and arrivals, with its goodput of each device, by bisection, and scales at some rates of each device. A
scale is the least multiple of both limits (the first token, each token after it) that nine tenths of the requests keep:
no limit steers the simulated scheduler, so it is found by sorting what each request needs, exactly, where the paper
bisects. Beyond its capacity a layout's scale grows with the number of requests. Layouts are one worker that does both
(steps of 2,048 tokens, or of 512, which delay answers less), the same with the step times of vLLM that the authors
published, and workers of both kinds with the links of one node. A run goes on from the rows that the file of --json
has.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from script import GrowingRows
from whether_to_split import Story, lengths

from millpond_lab.cluster_plan.layout import CacheSize, ClusterLayout, Link, WorkerPlan
from millpond_lab.cluster_plan.place import ATTAINED, Demand, ServiceLevels, goodput
from millpond_lab.cluster_plan.profile import A100, A100_VLLM, StepTimes
from millpond_lab.cluster_plan.profile_file import built_in
from millpond_lab.cluster_plan.simulate import RequestTimes, Simulation, sample


@dataclass(frozen=True)
class ScaleCase:
    """A model, its load, and the limits that DistServe's authors plot.

    Attributes:
        least: devices of the smallest worker. rates: of each device, in requests per second.
    """

    model: str
    weight_bytes: float
    least: int
    story: Story
    rates: tuple[float, ...]


#: Bytes of a device that a worker may use, nine tenths of 80 GB.
USABLE = 72e9
#: Between the workers of one node.
NODE = Link(400e9 / 8, 0.001)
CASES = (
    ScaleCase(
        "opt-13b", 26e9, 1, Story("chat", "azure", "azure2023_conv.csv", 2048, 0.25, 0.1), (0.5, 1.0, 1.5, 2.0, 2.5)
    ),
    ScaleCase(
        "opt-66b",
        132e9,
        4,
        Story("chat, 66B", "azure", "azure2023_conv.csv", 2048, 0.4, 0.1),
        (0.1, 0.2, 0.3, 0.4, 0.5),
    ),
    ScaleCase(
        "opt-66b",
        132e9,
        4,
        Story("summaries, 66B", "mooncake", "mooncake_conversation.jsonl", 8192, 15.0, 0.15),
        (0.02, 0.04, 0.06, 0.08),
    ),
)


def needed_scale(outcomes: Sequence[RequestTimes], levels: ServiceLevels) -> float:
    """The least multiple of both levels that `ATTAINED` of the requests keep."""
    needs = sorted(max(one.ttft / levels.ttft, (one.tpot or 0.0) / levels.tpot) for one in outcomes)
    return needs[-(-len(needs) * round(100 * ATTAINED) // 100) - 1]


def layouts_of(case: ScaleCase, times: Mapping[int, StepTimes]) -> Iterator[tuple[str, ClusterLayout]]:
    """Kind and layout: together, together with vLLM's times, and apart, of the workers that hold the weights."""

    def worker(role: Any, devices: int, own: StepTimes, step_tokens: int = 2048) -> WorkerPlan | None:
        memory = round(USABLE * devices - case.weight_bytes)
        return WorkerPlan(role, own, devices, memory, step_tokens) if memory > 0 else None

    least = case.least
    for devices in (least, 2 * least):
        own = times[devices]
        for step_tokens in (2048, 512):
            if (one := worker("both", devices, own, step_tokens)) is not None:
                yield f"together, steps of {step_tokens:,}", ClusterLayout((one,))
        vllm = A100_VLLM.get(case.model, {}).get(devices)
        if vllm is not None and (one := worker("both", devices, vllm)) is not None:
            yield "together, vLLM's times", ClusterLayout((one,))
    for read, readers, answer, decoders in ((1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (2, 1, 1, 1), (2, 1, 2, 1)):
        p = worker("prefill", least * read, times[least * read])
        d = worker("decode", least * answer, times[least * answer])
        if p is not None and d is not None:
            yield "apart", ClusterLayout((p,) * readers + (d,) * decoders)


def measure(case: ScaleCase, args: argparse.Namespace, rows: GrowingRows) -> None:
    """Add the rows of a case that are missing."""
    pairs = [(prompt, answer) for prompt, answer in lengths(case.story, args.traces) if min(prompt, answer) >= 4]
    levels, cache = ServiceLevels(case.story.ttft, case.story.tpot), built_in(case.model).cache
    name = case.story.name
    for kind, layout in layouts_of(case, A100[case.model]):
        for seed in range(args.seeds):
            if not rows.has(name, kind, layout.name, seed):
                scales = [
                    (rate, scale_of(layout, cache, pairs, levels, args.requests, rate, seed)) for rate in case.rates
                ]
                found = goodput(layout, cache, NODE, Demand(pairs, levels, args.requests, (seed,)))
                row = {"load": name, "kind": kind, "layout": layout.name, "seed": seed}
                rows.add(row | {"scales": scales, "goodput": found.per_device})


def scale_of(
    layout: ClusterLayout,
    cache: CacheSize,
    pairs: Sequence[tuple[int, int]],
    levels: ServiceLevels,
    requests: int,
    rate: float,
    seed: int,
) -> float:
    """The scale that a layout needs at a rate of each of its devices."""
    asked = sample(pairs, requests, rate * layout.devices, seed)
    outcomes = Simulation(layout, cache, NODE if layout.splits else None).run(asked)
    assert outcomes is not None, "nothing stops it"
    return needed_scale(outcomes, levels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="Folder with the published traces.")
    parser.add_argument("--loads", nargs="+", default=[case.story.name for case in CASES])
    parser.add_argument("--requests", type=int, default=400, help="Of one simulation.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = GrowingRows(args.json, {"requests": args.requests}, "load", "kind", "layout", "seed")
    for case in CASES:
        if case.story.name in args.loads:
            measure(case, args, rows)


if __name__ == "__main__":
    main()
