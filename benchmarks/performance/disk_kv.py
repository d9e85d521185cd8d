"""Prompts and decoding steps with all KV and weights on a disk: time, and what of it the calling thread computes.

    python benchmarks/performance/disk_kv.py [--requests 88] [--prompt 256] [--method full h2o] [--steps 20]
        [--rounds 3] [--python PYTHON ...] [--folder build/offload-0.16B] [--json FILE]

Each run is a process of its own. With several interpreters (--python), each with another version of Millpond, runs take
turns, and a ratio is the median over the rounds of the time of one version by that of the first in the same round.
Seconds of a core are those of the calling thread, which other processes hardly lengthen. Prompts are read by sweeps of
`--rows` tokens, in which those that were read before decode, as in a block of the schedule "zigzag".
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from script import begin, interval, keep

from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.open import open_in_memory
from millpond.engine.offload.plan import Plan
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond_lab.bench.offload.shapes import SHAPES, make_model, prompts_of

#: What is compared: seconds.
FIGURES = ("prompts_s", "step_s", "prompts_core_s", "step_core_s")


def measure(method: str, args: argparse.Namespace) -> dict[str, float]:
    """One run in this process."""
    torch.set_num_threads(args.threads)
    plan = Plan(
        weights={"disk": 1.0},
        kv={"disk": 1.0},
        micro_batch=args.micro_batch or args.requests,
        block=args.requests,
        prompt_rows=args.rows,
        slots=2,
    )
    budget = None if method == "full" else args.budget
    config = EngineConfig(method=method, budget=budget, kv_memory=args.kv_memory, max_running=args.requests)
    with tempfile.TemporaryDirectory(dir=args.folder) as disk:
        opened = open_in_memory(args.folder, None, plan, None, config, disk=disk)
        assert opened.tier is not None, "KV lies on the disk"
        engine = Engine(opened.model, None, opened.config, streamed=opened.streamed, tier=opened.tier)
        params = SamplingParams(max_tokens=args.prompt, temperature=0, ignore_eos=True)
        for n, prompt in enumerate(prompts_of(args.requests, args.prompt, args.shape)):
            engine.add(Request(request_id=str(n), prompt=prompt, params=params))
        n_tokens, steps, cores, read = args.requests * args.prompt, [], [], 0
        began, core = time.perf_counter(), time.thread_time()
        while engine.stats().prompt_tokens < n_tokens:
            engine.step()
        prompts_s, prompts_core_s = time.perf_counter() - began, time.thread_time() - core
        for n in range(args.steps + 1):
            began, core, before = time.perf_counter(), time.thread_time(), opened.tier.bytes_read
            assert not [out.error for out in engine.step() if out.error is not None], "no request fails"
            if n:  # the first one begins to read ahead
                steps.append(time.perf_counter() - began)
                cores.append(time.thread_time() - core)
                read = opened.tier.bytes_read - before
        engine.close()
    return {
        "prompts_s": prompts_s,
        "step_s": statistics.median(steps),
        "prompts_core_s": prompts_core_s,
        "step_core_s": statistics.median(cores),
        "step_kv_bytes": read,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.16B")
    parser.add_argument("--folder", type=Path, help="Of the model; made where there is none.")
    parser.add_argument("--requests", type=int, default=88)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--rows", type=int, default=512, help="Tokens of a sweep that reads prompts.")
    parser.add_argument("--micro-batch", type=int, help="Sequences whose pages are read together; default: all.")
    parser.add_argument("--method", nargs="+", default=["full", "h2o"])
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--kv-memory", default="400MiB")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="Interpreters of the versions.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args, _ = begin(parser)
    if args.tiny:
        args.requests, args.prompt, args.steps, args.rounds = min(args.requests, 6), min(args.prompt, 48), 3, 1
    args.folder = args.folder or Path("build") / f"offload-{args.shape}"
    if args.child:
        print(json.dumps(measure(args.child, args)))
        return
    make_model(args.folder, args.shape)
    rows = []
    for method in args.method:
        found: list[list[dict[str, float]]] = [[] for _ in args.python]
        for _ in range(args.rounds):
            for number, (runs, python) in enumerate(zip(found, args.python, strict=True)):
                runs.append(_in_a_process(python, method))
                shown = ", ".join(f"{name} {runs[-1][name]:.3f}" for name in FIGURES)
                print(f"{method:6} version {number}: {shown}", flush=True)
        for number, runs in enumerate(found):
            row: dict[str, Any] = {"method": method, "version": number, "runs": runs}
            for name in FIGURES:
                ratios = [one[name] / first[name] for one, first in zip(runs, found[0], strict=True)]
                row[name] = statistics.median(run[name] for run in runs)
                row[f"{name}_ratio"] = [statistics.median(ratios), *interval(ratios)]
            rows.append(row)
            ratios_of = ", ".join(f"{name} {row[f'{name}_ratio'][0]:.2f}" for name in FIGURES)
            print(f"{method:6} version {number} by the first: {ratios_of}")
    args.python = len(args.python)
    args.folder = args.folder.name
    keep(args, rows)


def _in_a_process(python: str, method: str) -> dict[str, float]:
    command = [python, __file__, *sys.argv[1:], "--child", method]
    child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
