"""What a simulation of a cluster predicts against what the same requests take on workers of this machine.

    python benchmarks/performance/plan_against_engine.py profile --folder DIR
    python benchmarks/performance/plan_against_engine.py measure --folder DIR --layout 1x1
    python benchmarks/performance/plan_against_engine.py report --folder DIR --trace azure2023_conv.csv

`profile` makes a model of random weights and fits its step times with one thread, with two, and with one while another
engine is at work, since two workers on two cores share caches and memory; it also times how long a move occupies the
engines. `moves` does that alone for the profile of a split that is there, in CPU seconds. `measure` starts workers on a
private Ray, takes the time of a few requests alone (for the latency of a move), and then sends requests of the trace,
shrunk, at three rates around the one that the simulation takes for the highest. `report` compares. Run each on a quiet
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millpond.bench.common.machine import describe_machine
from millpond.bench.generate.candidates import ModelShape
from millpond.bench.serve.requests import TokenBlocks
from millpond.bench.serve.traces import azure
from millpond.cluster.plan.fit import fit
from millpond.cluster.plan.goodput import ATTAINED, Demand, ServiceLevels, goodput
from millpond.cluster.plan.layout import ClusterLayout, Link, WorkerPlan
from millpond.cluster.plan.measure import Measured, measure
from millpond.cluster.plan.measure_moves import measure_moves
from millpond.cluster.plan.move_times import FREE_MOVES, MoveTimes
from millpond.cluster.plan.profile import StepLoad
from millpond.cluster.plan.profile_file import Profile, load_profile, save_profile
from millpond.cluster.plan.requests import PlannedRequest, sample
from millpond.cluster.plan.simulate import RequestTimes, Simulation
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.models.load import load_model

SHAPE = ModelShape()
#: By name: roles and threads of the workers, and the profile that holds for them.
LAYOUTS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "1x1": (("both",), 1, "one"),
    "1x2": (("both",), 2, "two"),
    "2x1": (("both", "both"), 1, "shared"),
    "split": (("prefill", "decode"), 1, "shared"),
}
#: Of the rate that the simulation takes for the highest.
AROUND = (0.75, 1.0, 1.25)
#: Tokens of the prompts of requests that run alone.
ALONE = (16, 64, 160, 320)
SEED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("profile", "neighbour", "moves", "measure", "report"))
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
        take_profiles(args.folder)
    elif args.step == "neighbour":
        asyncio.run(keep_busy(args.folder))
    elif args.step == "moves":
        add_moves(args.folder)
    elif args.step == "measure":
        asyncio.run(run_layout(args))
    else:
        report(args)


# ------------------------------------------------------------------ profiles


def take_profiles(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        SHAPE.build().save_pretrained(folder / "model")
    for name, threads in (("one", 1), ("two", 2)):
        take_profile(folder, name, threads)
    with neighbour(folder):
        take_profile(folder, "shared", 1)


@contextmanager
def neighbour(folder: Path) -> Iterator[None]:
    """Another process that takes profiles, for as long as this is open."""
    busy = subprocess.Popen([sys.executable, __file__, "neighbour", "--folder", str(folder)], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()  # it is at work
        yield
    finally:
        busy.kill()
        busy.wait()


def take_profile(folder: Path, name: str, threads: int) -> None:
    found = asyncio.run(one_profile(folder, name, threads))
    save_profile(found.profile, folder / f"profile-{name}.json")
    steps = [[asdict(load), seconds] for load, seconds in found.steps]
    (folder / f"steps-{name}.json").write_text(json.dumps(steps))
    print(
        f"profile {name}: {len(steps)} steps, {found.error:.1%} off in the median, {found.profile.times[1]}", flush=True
    )
    print_moves(name, found.profile)


@asynccontextmanager
async def opened(folder: Path, threads: int) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(load_model(str(folder / "model"), "bf16"), threads=threads, method="full")
    try:
        yield llm
    finally:
        await llm.close(drain=False)


async def one_profile(folder: Path, name: str, threads: int) -> Measured:
    async with opened(folder, threads) as llm:
        note = describe_machine().hardware
        return await measure(llm, name, prompts=ALONE, new=24, rounds=2, seed=SEED, note=note)


async def keep_busy(folder: Path) -> None:
    """Take profiles for ever, so that another one has a neighbour."""
    async with opened(folder, 1) as llm:
        print("at work", flush=True)
        while True:
            await measure(llm, "neighbour", prompts=ALONE, new=24, rounds=1, seed=SEED)


def add_moves(folder: Path) -> None:
    """Time moves while another engine is at work, and write them into the profile that holds for a split.

    On a machine that is busy the seconds of a clock hold what others do. Those of this process's one thread hold little
    of it, and are taken.
    """
    torch.set_num_threads(1)
    engine = Engine(load_model(str(folder / "model"), "bf16"), method="full")
    profile = load_profile(str(folder / "profile-shared.json"))
    lengths = (min(ALONE), max(ALONE))
    with neighbour(folder):
        began, used = time.monotonic(), cpu_seconds([os.getpid()])
        by_clock = measure_moves(engine, profile.cache, lengths, SEED)
        all_, own = (b - a for a, b in zip(used, cpu_seconds([os.getpid()]), strict=True))
        others = (all_ - own) / (time.monotonic() - began)
        moves = measure_moves(engine, profile.cache, lengths, SEED, time.process_time)
    engine.close()
    save_profile(replace(profile, moves=moves), folder / "profile-shared.json")
    data = {"by_clock": asdict(by_clock), "by_cpu": asdict(moves), "cores_of_others": others}
    (folder / "moves.json").write_text(json.dumps(data))
    print(f"others had {others:.2f} cores, the neighbour among them")
    print_moves("by the clock", replace(profile, moves=by_clock))
    print_moves("by CPU seconds", replace(profile, moves=moves))


def print_moves(name: str, profile: Profile) -> None:
    for prompt in (16, 96, 320):
        size, moves = profile.cache.moved(prompt), profile.moves
        print(
            f"{name}: a move of {prompt} tokens, {size:,} bytes: {1e3 * moves.packing(size):.1f} ms to pack, "
            f"{1e3 * moves.taking_in(size):.1f} ms to take in", flush=True,
        )  # fmt: skip


def the_profile(folder: Path, layout: str) -> Profile:
    return load_profile(str(folder / f"profile-{LAYOUTS[layout][2]}.json"))


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


def overhead_of(folder: Path) -> float:
    """Seconds that a step takes longer in a worker, which sends its tokens: of requests alone on one worker."""
    times = the_profile(folder, "1x1").times[1]
    alone = json.loads((folder / "measured-1x1.json").read_text())["alone"]
    longer = [tpot - times.seconds(StepLoad(answers=1, entries=prompt)) for prompt, _, tpot in alone]
    return max(statistics.median(longer), 0.0)


def simulate(
    args: argparse.Namespace, layout: str, requests: list[PlannedRequest], link: Link, overhead: float,
    moves: MoveTimes | None = None,
) -> list[RequestTimes]:  # fmt: skip
    workers = planned(args.folder, layout).workers
    plan = ClusterLayout(
        tuple(
            replace(one, times=one.times.with_overhead(overhead), moves=one.moves if moves is None else moves)
            for one in workers
        )
    )
    found = Simulation(plan, the_profile(args.folder, layout).cache, link).run(requests)
    assert found is not None
    return found


def knee(args: argparse.Namespace, layout: str, link: Link) -> float:
    """The highest rate by the simulation, in requests per second of the whole layout."""
    demand = Demand(shrunk(args), ServiceLevels(args.ttft, args.tpot), 300, (0, 1))
    plan = planned(args.folder, layout)
    return goodput(plan, the_profile(args.folder, layout).cache, link, demand).per_device * plan.devices


# ------------------------------------------------------------------ measurement


async def run_layout(args: argparse.Namespace) -> None:
    from millpond.cluster.async_llm import AsyncClusterLLM

    roles, threads, _ = LAYOUTS[args.layout]
    busy = busy_share()
    workers: dict[str, int] = {"prefill": 1, "decode": 1} if "prefill" in roles else {"replicas": len(roles)}
    llm = AsyncClusterLLM(str(args.folder / "model"), dtype="bf16", threads=threads, method="full", **workers)
    pids = [worker.pid for worker in llm.workers()]
    print("workers are there", flush=True)
    try:
        for round_ in range(2):  # the first one warms up
            alone = []
            for n, prompt in enumerate(ALONE * 2):
                alone.append((prompt, *await one_request(llm, f"alone-{round_}-{n}", prompt, 3, time.monotonic())))
        link = link_of(args.folder, args.layout, alone) if "prefill" in roles else Link()
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
    finally:
        await llm.close(drain=False)
    machine = describe_machine()
    data = {
        "layout": args.layout, "knee": highest, "busy_before": busy, "alone": alone, "rows": rows,
        "hardware": machine.hardware, "software": machine.software,
    }  # fmt: skip
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


def link_of(
    folder: Path, layout: str, alone: list[tuple[int, float, float]], overhead: float = 0.0,
    moves: MoveTimes | None = None,
) -> Link:  # fmt: skip
    """Latency of a move: what the second token of a request that is alone takes longer than a step and both engines."""
    profile = the_profile(folder, layout)
    moves = profile.moves if moves is None else moves
    extra = []
    for prompt, _, tpot in alone:
        step = profile.times[1].seconds(StepLoad(answers=1, entries=prompt)) + overhead
        size = profile.cache.moved(prompt)
        extra.append(2 * (tpot - step) - moves.packing(size) - moves.taking_in(size))
    return Link(latency_s=max(statistics.median(extra), 0.0))


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
        "attained": float(met.mean()), "ttft_p90": float(np.quantile(first, 0.9)),
        "tpot_p90": float(np.quantile(each, 0.9)),
    }  # fmt: skip


def report(args: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    points: dict[str, list[float]] = {"simulated": [], "with overhead": [], "moves on the way only": []}
    crossing: dict[str, dict[str, float]] = {kind: {} for kind in ("measured", *points)}
    overhead = overhead_of(args.folder)
    machine: dict[str, Any] = {}
    for layout in LAYOUTS:
        path = args.folder / f"measured-{layout}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        machine = {"hardware": data["hardware"], "software": data["software"]}
        link = free = Link()
        if layout == "split":
            link, free = (link_of(args.folder, layout, data["alone"], overhead, moves) for moves in (None, FREE_MOVES))
            print(f"latency of a move {1e3 * link.latency_s:.1f} ms; {1e3 * free.latency_s:.1f} ms on the way only")
        curve: dict[str, list[tuple[float, float]]] = {kind: [] for kind in crossing}
        for row in data["rows"]:
            requests = sample(shrunk(args), len(row["times"]), row["rate"], SEED)
            both = {"measured": summary(args, row["times"])}
            for kind in points:
                more = overhead if kind == "with overhead" else 0.0
                moves, way = (FREE_MOVES, free) if kind == "moves on the way only" else (None, link)
                found = simulate(args, layout, requests, way, more, moves)
                both[kind] = summary(args, [(one.ttft, one.tpot or 0.0) for one in found])
            for kind, values in both.items():
                curve[kind].append((row["rate"], values["attained"]))
            for kind, off in points.items():
                off.append(abs(both["measured"]["attained"] - both[kind]["attained"]))
            cores = {f"cores_of_{name}": used for name, used in row["cores"].items()}
            results.append({"layout": layout, "rate": row["rate"], "busy_before": data["busy_before"], **cores, **both})
        for kind, values in curve.items():
            crossing[kind][layout] = crosses(values)
    for row in results:
        cells = [
            f"{kind}: {row[kind]['attained']:.2f}, {row[kind]['ttft_p90']:.2f} s, {1e3 * row[kind]['tpot_p90']:.0f} ms"
            for kind in crossing
        ]
        print(f"{row['layout']} {row['rate']:.2f}/s attained, TTFT and TPOT p90:", *cells, sep=" | ")
    for kind, off in points.items():
        print(f"{kind}: attained off by {statistics.fmean(off):.3f} in the mean, {max(off):.3f} at most")
    print(f"overhead {1e3 * overhead:.1f} ms a step;", crossing)
    if args.json:
        load = {name: getattr(args, name) for name in ("shrink", "ttft", "tpot")}
        fits = {
            name: fit([(StepLoad(**load_), seconds) for load_, seconds in json.loads(path.read_text())])[1]
            for name in ("one", "two", "shared")
            if (path := args.folder / f"steps-{name}.json").exists()
        }
        data = {
            "load": load, "shape": asdict(SHAPE), "fit_off": fits, **machine, "rate_at_nine_tenths": crossing,
            "overhead_s": overhead,
            "moves": asdict(the_profile(args.folder, "split").moves),
            **timed_moves(args.folder),
            "samples": "one run of each row",
            "results": results,
        }  # fmt: skip
        args.json.write_text(json.dumps(data, indent=1) + "\n")


def timed_moves(folder: Path) -> dict[str, Any]:
    """What `moves` wrote, where it was run after the profiles."""
    path = folder / "moves.json"
    return {"moves_timed": json.loads(path.read_text())} if path.exists() else {}


def crosses(curve: list[tuple[float, float]]) -> float:
    """The rate at which nine tenths are in time, by lines between points; an end of the curve where it is outside."""
    for (low, a), (high, b) in pairwise(curve):
        if a >= ATTAINED > b:
            return low + (high - low) * (a - ATTAINED) / (a - b)
    return curve[0][0] if curve[0][1] < ATTAINED else curve[-1][0]


if __name__ == "__main__":
    main()
