"""What a simulation of a cluster predicts against what the same requests take on workers of this machine.

    python benchmarks/performance/plan_against_engine.py profile --folder DIR --layout 1x1
    python benchmarks/performance/plan_against_engine.py measure --folder DIR --layout 1x1
    python benchmarks/performance/plan_against_engine.py report --folder DIR --trace azure2023_conv.csv

`profile` makes a model of random weights, starts the workers of a layout on a private Ray and fits the times of their
steps and moves under requests that arrive independently. `measure` starts them again and sends requests of the trace,
shrunk, at three rates around the one that the simulation takes for the highest. `report` compares. Run each on a quiet
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from millpond.cluster.async_llm import AsyncClusterLLM
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.generate.candidates import ModelShape
from millpond_lab.bench.serve.requests import TokenBlocks, azure
from millpond_lab.cluster_plan.layout import ClusterLayout, Link, WorkerPlan
from millpond_lab.cluster_plan.measure import measure
from millpond_lab.cluster_plan.place import ATTAINED, Demand, ServiceLevels, goodput
from millpond_lab.cluster_plan.profile import StepLoad, fit
from millpond_lab.cluster_plan.profile_file import Profile, load_profile, save_profile
from millpond_lab.cluster_plan.simulate import PlannedRequest, RequestTimes, Simulation, sample

SHAPE = ModelShape()
#: By name: roles and threads of the workers.
LAYOUTS: dict[str, tuple[tuple[str, ...], int]] = {
    "1x1": (("both",), 1),
    "1x2": (("both",), 2),
    "2x1": (("both", "both"), 1),
    "split": (("prefill", "decode"), 1),
}
#: Of the rate that the simulation takes for the highest.
AROUND = (0.75, 1.0, 1.25)
#: Tokens of the prompts of requests that run alone.
ALONE = (16, 64, 160, 320)
SEED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("profile", "measure", "report"))
    parser.add_argument("--folder", type=Path, required=True, help="For the model, profiles and measured times.")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="1x1")
    parser.add_argument("--trace", type=Path, help="Azure 2023, conversation.")
    parser.add_argument("--shrink", type=int, default=8, help="Divide the lengths of the trace by this.")
    parser.add_argument("--seconds", type=float, default=35, help="Of arrivals at each rate.")
    parser.add_argument("--ttft", type=float, default=0.6)
    parser.add_argument("--tpot", type=float, default=0.04)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.step == "profile":
        asyncio.run(take_profile(args.folder, args.layout))
    elif args.step == "measure":
        asyncio.run(run_layout(args))
    else:
        report(args)


# ------------------------------------------------------------------ profiles


@asynccontextmanager
async def opened(folder: Path, layout: str) -> AsyncIterator[AsyncClusterLLM]:
    """The workers of a layout."""
    roles, threads = LAYOUTS[layout]
    workers: dict[str, int] = {"prefill": 1, "decode": 1} if "prefill" in roles else {"replicas": len(roles)}
    llm = AsyncClusterLLM(str(folder / "model"), dtype="bf16", threads=threads, method="full", **workers)
    print("workers are there", flush=True)
    try:
        yield llm
    finally:
        await llm.close(drain=False)


async def take_profile(folder: Path, layout: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        SHAPE.build().save_pretrained(folder / "model")
    async with opened(folder, layout) as llm:
        note = describe_machine().hardware
        found = await measure(
            llm, layout, prompts=ALONE, new=24, rounds=2, seed=SEED, workers=len(LAYOUTS[layout][0]), note=note
        )
    save_profile(found.profile, folder / f"profile-{layout}.json")
    steps = [[asdict(load), seconds] for load, seconds in found.steps]
    (folder / f"steps-{layout}.json").write_text(json.dumps(steps))
    if found.latency_s is not None:
        (folder / f"latency-{layout}.json").write_text(json.dumps(found.latency_s))
        print(f"{layout}: a move is {1e3 * found.latency_s:.1f} ms on its way")
    times, moves = found.profile.times[1], found.profile.moves
    print(f"profile {layout}: {len(steps)} steps, {found.error:.1%} off in the median, {times}", flush=True)
    for prompt in (16, 96, 320):
        size = found.profile.cache.moved(prompt)
        print(
            f"{layout}: a move of {prompt} tokens, {size:,} bytes: {1e3 * moves.packing(size):.1f} ms to pack, "
            f"{1e3 * moves.taking_in(size):.1f} ms to take in",
            flush=True,
        )


def the_profile(folder: Path, layout: str) -> Profile:
    return load_profile(str(folder / f"profile-{layout}.json"))


# ------------------------------------------------------------------ simulation


def planned(folder: Path, layout: str) -> ClusterLayout:
    profile, roles = the_profile(folder, layout), LAYOUTS[layout][0]
    return ClusterLayout(
        tuple(
            WorkerPlan(role, profile.times[1], step_tokens=profile.step_tokens, moves=profile.moves)  # type: ignore[arg-type]
            for role in roles
        )
    )


def shrunk(args: argparse.Namespace) -> list[tuple[int, int]]:
    asks = azure(args.trace)
    pairs = [(one.prompt.length, one.output_tokens) for one in asks if isinstance(one.prompt, TokenBlocks)]
    return [
        (max(prompt // args.shrink, 4), max(answer // args.shrink, 2))
        for prompt, answer in pairs
        if prompt + answer < 2048
    ]


def simulate(args: argparse.Namespace, layout: str, requests: list[PlannedRequest], link: Link) -> list[RequestTimes]:
    found = Simulation(planned(args.folder, layout), the_profile(args.folder, layout).cache, link).run(requests)
    assert found is not None
    return found


def knee(args: argparse.Namespace, layout: str, link: Link) -> float:
    """The highest rate by the simulation, in requests per second of the whole layout."""
    demand = Demand(shrunk(args), ServiceLevels(args.ttft, args.tpot), 300, (0, 1))
    plan = planned(args.folder, layout)
    return goodput(plan, the_profile(args.folder, layout).cache, link, demand).per_device * plan.devices


# ------------------------------------------------------------------ measurement


async def run_layout(args: argparse.Namespace) -> None:
    busy = busy_share()
    async with opened(args.folder, args.layout) as llm:
        pids = [worker.pid for worker in llm.workers()]
        for n, prompt in enumerate(ALONE * 2):  # warms up
            await one_request(llm, f"alone-{n}", prompt, 3, time.monotonic())
        link = link_of(args.folder, args.layout)
        highest = knee(args, args.layout, link)
        rows = []
        for share in AROUND:
            requests = sample(shrunk(args), round(args.seconds * share * highest), share * highest, SEED)
            begun, used = time.monotonic() + 0.5, cpu_seconds(pids)
            found = await asyncio.gather(
                *(
                    one_request(llm, f"{share}-{n}", one.prompt, one.output, begun + one.at)
                    for n, one in enumerate(requests)
                )
            )
            seconds = time.monotonic() - begun
            all_, own = (b - a for a, b in zip(used, cpu_seconds(pids), strict=True))
            cores = {"workers": own / seconds, "others": (all_ - own) / seconds}
            rows.append({"rate": share * highest, "times": found, "cores": cores})
            print(f"{args.layout} at {share * highest:.2f}/s: {summary(args, list(found))}", flush=True)
    machine = describe_machine()
    data = {
        "layout": args.layout,
        "knee": highest,
        "busy_before": busy,
        "rows": rows,
        "hardware": machine.hardware,
        "software": machine.software,
    }
    (args.folder / f"measured-{args.layout}.json").write_text(json.dumps(data))


async def one_request(llm: Any, name: str, prompt: int, output: int, at: float) -> tuple[float, float]:
    """Seconds from `at` to the first token, and per token after it."""
    await asyncio.sleep(max(at - time.monotonic(), 0.0))
    ids = np.random.default_rng(abs(hash((prompt, output)))).integers(0, SHAPE.vocab, prompt)
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    first = last = 0.0
    count = 0
    async for update in llm.stream(Request(request_id=name, prompt=tuple(ids.tolist()), params=params)):
        if update.error is not None:
            raise update.error
        last, count = time.monotonic(), len(update.completions[0].token_ids)
        first = first or (last if count else 0.0)
    assert count == output, f"{name}: {count} of {output} tokens"
    return first - at, (last - first) / (output - 1)


def link_of(folder: Path, layout: str) -> Link:
    """As it was while the profile was taken."""
    path = folder / f"latency-{layout}.json"
    return Link(latency_s=json.loads(path.read_text())) if path.exists() else Link()


def busy_share() -> float:
    """Cores that others use, over a second in which this process sleeps."""
    before = cpu_seconds([])[0]
    time.sleep(1.0)
    return cpu_seconds([])[0] - before


def cpu_seconds(pids: Sequence[int]) -> tuple[float, float]:
    """Seconds for which the cores of this machine have worked, and those for which these processes had them."""
    tick = os.sysconf("SC_CLK_TCK")
    spent = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    own = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return (sum(spent) - spent[3] - spent[4]) / tick, sum(int(one[11]) + int(one[12]) for one in own) / tick


# ------------------------------------------------------------------ report


def summary(args: argparse.Namespace, times: list[tuple[float, float]]) -> dict[str, float]:
    first, each = np.array(times).T
    met = (first <= args.ttft) & (each <= args.tpot)
    return {
        "attained": float(met.mean()),
        "ttft_p90": float(np.quantile(first, 0.9)),
        "tpot_p90": float(np.quantile(each, 0.9)),
    }


def report(args: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    crossing: dict[str, dict[str, float]] = {"measured": {}, "simulated": {}}
    machine: dict[str, Any] = {}
    for layout in LAYOUTS:
        path = args.folder / f"measured-{layout}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        machine = {"hardware": data["hardware"], "software": data["software"]}
        link = link_of(args.folder, layout)
        curve: dict[str, list[tuple[float, float]]] = {kind: [] for kind in crossing}
        for row in data["rows"]:
            requests = sample(shrunk(args), len(row["times"]), row["rate"], SEED)
            found = simulate(args, layout, requests, link)
            both = {
                "measured": summary(args, row["times"]),
                "simulated": summary(args, [(one.ttft, one.tpot or 0.0) for one in found]),
            }
            for kind, values in both.items():
                curve[kind].append((row["rate"], values["attained"]))
            cores = {f"cores_of_{name}": used for name, used in row["cores"].items()}
            results.append({"layout": layout, "rate": row["rate"], "busy_before": data["busy_before"], **cores, **both})
        for kind, points in curve.items():
            crossing[kind][layout] = crosses(points)
    for row in results:
        cells = [
            f"{kind}: {row[kind]['attained']:.2f}, {row[kind]['ttft_p90']:.2f} s, {1e3 * row[kind]['tpot_p90']:.0f} ms"
            for kind in crossing
        ]
        print(f"{row['layout']} {row['rate']:.2f}/s attained, TTFT and TPOT p90:", *cells, sep=" | ")
    off = [abs(row["measured"]["attained"] - row["simulated"]["attained"]) for row in results]
    print(f"attained off by {statistics.fmean(off):.3f} in the mean, {max(off):.3f} at most; {crossing}")
    if args.json:
        load = {name: getattr(args, name) for name in ("shrink", "ttft", "tpot")}
        fits = {
            name: fit([(StepLoad(**load_), seconds) for load_, seconds in json.loads(path.read_text())])[1]
            for name in LAYOUTS
            if (path := args.folder / f"steps-{name}.json").exists()
        }
        data = {
            "load": load,
            "shape": asdict(SHAPE),
            "fit_off": fits,
            **machine,
            "rate_at_nine_tenths": crossing,
            "attained_off": {"mean": statistics.fmean(off), "most": max(off)},
            "moves": asdict(the_profile(args.folder, "split").moves),
            "latency_of_a_move_s": link_of(args.folder, "split").latency_s,
            "samples": "one run of each row",
            "results": results,
        }
        args.json.write_text(json.dumps(data, indent=1) + "\n")


def crosses(curve: list[tuple[float, float]]) -> float:
    """The rate at which nine tenths are in time, by lines between points; an end of the curve where it is outside."""
    for (low, a), (high, b) in pairwise(curve):
        if a >= ATTAINED > b:
            return low + (high - low) * (a - ATTAINED) / (a - b)
    return curve[0][0] if curve[0][1] < ATTAINED else curve[-1][0]


if __name__ == "__main__":
    main()
