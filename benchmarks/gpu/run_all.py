"""All that is measured on a CUDA GPU, the most valuable first, in the minutes that there are.

    PYTHONPATH=src python benchmarks/gpu/run_all.py --minutes 9 --out DIR

A row is written to DIR/gpu-rows.jsonl after each cell: card, versions, seconds, the figure and its bound. A run goes on
from the rows that are there; errors and mismatches are run again, others are not. A cell that raises an error is a row
with its message. No cell begins for which the time does not suffice, and none outlasts it. --match takes only the
cells whose section and name hold one of some comma-separated texts.

Sections, in this order (--only takes a comma-separated choice):
    rates     bandwidth of a copy, a product in bf16, an upload
    tokens    every method and codec in generate() and in the engine, placements: tokens against the CPU's
    profile   kernels, launches, waits and gaps of a decoding step
    steady    tokens a second of as many requests of 8,192 tokens as 30 GB hold
    step      a decoding step of an 8B shape: batches, contexts, full, h2o, snapkv, codes
    prompt    seconds to the first token of 8,192 and 32,768 tokens
    generate  generate() under our caches, DynamicCache and StaticCache
    kernels   decoding and causal attention of one layer, codes and bf16
    offload   an OPT-6.7B shape inside 16 GB, ours and Accelerate's
--dry-run runs all of them in small on the CPU, Triton in its interpreter: a test of this script, not of speed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from gpu_engine import Bench, profile_cells, prompt_cells, rates_cells, steady_cells, step_cells
from gpu_generate import generate_cells
from gpu_machine import Machine
from gpu_offload import offload_cells
from gpu_rows import Cell, CellRunner, RowFile, RunClock
from gpu_speed import kernel_cells
from gpu_tokens import codec_cells, engine_cells, method_cells, place_cells

FILE = "gpu-rows.jsonl"
#: Processes that compare tokens side by side; most of their time is the host's.
PARTS = 12
#: Seconds that they take together at most, imports and kernels that are compiled included.
TOKENS_S = 100.0


def token_cells(machine: Machine) -> list[Cell]:
    """All comparisons with the CPU; those that take longest to compile first."""
    return [*codec_cells(machine), *method_cells(machine), *engine_cells(machine), *place_cells(machine)]


def compare_tokens(options: argparse.Namespace, machine: Machine, clock: RunClock, runner: CellRunner) -> None:
    """Run the comparisons, on a GPU in several processes, each with every n-th cell."""
    if not machine.cuda:
        return runner.run(token_cells(machine))
    minutes = min(clock.left(), TOKENS_S) / 60
    command = [sys.executable, __file__, "--only", "tokens", "--out", str(options.out), "--minutes", f"{minutes:.2f}"]
    if options.match:
        command += ["--match", options.match]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # all with all threads stand in each other's way
    parts = [subprocess.Popen([*command, "--part", f"{n}/{PARTS}"], env=one_thread) for n in range(PARTS)]
    for n, part in enumerate(parts):
        try:
            ended = part.wait(timeout=max(1.0, minutes * 60 + 30))
        except subprocess.TimeoutExpired:
            part.kill()
            ended = 124
        if ended:
            runner.failed.append(f"tokens, part {n}: status {ended}")


def sections(
    options: argparse.Namespace, machine: Machine, clock: RunClock, runner: CellRunner
) -> dict[str, Callable[[], None]]:
    """What each section runs."""
    bench = Bench(machine)

    def tokens() -> None:
        if options.part is not None:
            k, n = map(int, options.part.split("/"))
            runner.run(token_cells(machine)[k::n])
        else:
            compare_tokens(options, machine, clock, runner)

    def offload() -> None:
        bench.free()  # its cells are processes of their own
        runner.run(offload_cells(machine))

    return {
        "rates": lambda: runner.run(rates_cells(bench)),
        "tokens": tokens,
        "profile": lambda: runner.run(profile_cells(bench)),
        "steady": lambda: runner.run(steady_cells(bench)),
        "step": lambda: runner.run(step_cells(bench)),
        "prompt": lambda: runner.run(prompt_cells(bench)),
        "generate": lambda: runner.run(generate_cells(bench)),
        "kernels": lambda: runner.run(kernel_cells(machine)),
        "offload": offload,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {FILE}")
    parser.add_argument("--minutes", type=float, default=9.0, help="how long the run may take")
    parser.add_argument("--only", help="comma-separated sections; all by default")
    parser.add_argument("--match", help="comma-separated texts; cells whose section and name hold one of them")
    parser.add_argument("--part", help="K/N: of the comparisons of tokens every N-th from the K-th on")
    parser.add_argument("--dry-run", action="store_true", help="all in small on the CPU")
    options = parser.parse_args()
    clock = RunClock(60 * options.minutes)
    machine = Machine(interpret=options.dry_run, tiny=options.dry_run)
    rows = RowFile(options.out / FILE, machine.describe())
    texts = options.match.split(",") if options.match else [""]
    runner = CellRunner(rows, clock, lambda line: print(line, flush=True), texts)
    runs = sections(options, machine, clock, runner)
    chosen = options.only.split(",") if options.only else list(runs)
    unknown = [name for name in chosen if name not in runs]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: no such section; there are {', '.join(runs)}")
    for name in chosen:
        runs[name]()
    failed, left_out = runner.failed, runner.left_out
    print(f"failed: {', '.join(failed) or 'none'}\nleft out: {', '.join(left_out) or 'none'}", flush=True)
    return int(bool(failed) or (options.dry_run and bool(left_out)))


if __name__ == "__main__":
    raise SystemExit(main())
