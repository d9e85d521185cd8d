"""All that is measured on a CUDA GPU, the most valuable first, in the minutes that there are.

    PYTHONPATH=src python benchmarks/gpu/run_all.py --minutes 9 --out DIR

A row is written to DIR/gpu-rows.jsonl after each cell: card, versions, seconds, the figure, its bound and its goal. A
run goes on from the rows that are there; errors, mismatches and skipped cells are run again, others are not. A cell
that raises an error is a row with its message. No cell begins for which the time does not suffice, and none outlasts
it; what was left out is told at the end, and which goals are met. --match takes only the cells whose section and name
hold one of some comma-separated texts.

Sections (--only takes a comma-separated choice); their cells run in the order of `stages`, some sections in parts:
    rates     bandwidth of a copy, a product in bf16, an upload
    step      a decoding step of an 8B shape: batches, contexts, full, h2o, snapkv, codes
    steady    tokens a second of as many requests of 8,192 or 32,768 tokens as 30 GB hold
    served    the same end to end: requests arrive, prompts are read, answers of 256 and 2,048 tokens are written
    prompt    seconds to the first token of 8,192 and 32,768 tokens, ours and transformers' with flash attention
    generate  generate() under our caches, DynamicCache, StaticCache and compiled StaticCache
    offload   OPT-6.7B and OPT-30B shapes inside 16 GB, ours and Accelerate's
    latency   seconds of one batch on the same two shapes, all on the device: the batches of H2O's Table 5
    storage   the codec transform: gigabytes a second that are coded and decoded
    tokens    every method and codec in generate() and in the engine, placements: tokens against the CPU's
    profile   kernels, launches, waits and gaps of a decoding step
    kernels   decoding and causal attention of one layer, codes and bf16
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

from gpu_bench import Bench
from gpu_engine import LONG, STEADY, profile_cells, rates_cells, steady_cells, step_cells
from gpu_generate import COMPILED, FIRST_CACHES, OTHER_CACHES, generate_cells
from gpu_goals import to_show, verdict_text, verdicts
from gpu_latency import latency_cells
from gpu_machine import Machine
from gpu_offload import offload_cells
from gpu_prompt import prompt_cells
from gpu_rows import Cell, CellRunner, RowFile, RunClock, read_rows
from gpu_served import served_cells, wave_cells
from gpu_speed import kernel_cells
from gpu_storage import storage_cells
from gpu_tokens import codec_cells, engine_cells, method_cells, place_cells

FILE = "gpu-rows.jsonl"
#: Processes that compare tokens side by side; most of their time is the host's.
PARTS = 12
#: Settings of a section that run before the other sections: full, h2o and fp8, whose rows goals compare.
FIRST_SETTINGS = 3
#: Cells of the smaller offloaded model that run before the others: h2o, full and Accelerate, short answers.
FIRST_OFFLOADED = 3
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


def stages(
    options: argparse.Namespace, machine: Machine, clock: RunClock, runner: CellRunner
) -> list[tuple[str, Callable[[], None]]]:
    """Sections, or parts of them, in the order in which they run: first what says most for its seconds."""
    bench = Bench(machine)

    def cells(make: Callable[[], list[Cell]], apart: bool = False) -> Callable[[], None]:
        def run() -> None:
            if apart:
                bench.free()  # its cells have models of their own
            runner.run(make())

        return run

    def tokens() -> None:
        if options.part is not None:
            k, n = map(int, options.part.split("/"))
            runner.run(token_cells(machine)[k::n])
        else:
            compare_tokens(options, machine, clock, runner)

    def offload(size: str, first: int = 0, last: int | None = None) -> Callable[[], None]:
        rows = options.out / FILE
        return cells(lambda: offload_cells(machine, lambda: bench.rates, size, rows)[first:last], apart=True)

    return [
        ("rates", cells(lambda: rates_cells(bench))),
        ("step", cells(lambda: step_cells(bench, with_goal=True))),
        ("steady", cells(lambda: steady_cells(bench, STEADY))),
        ("served", cells(lambda: served_cells(bench, last=FIRST_SETTINGS))),
        ("prompt", cells(lambda: prompt_cells(bench, with_goal=True))),
        ("generate", cells(lambda: generate_cells(bench, FIRST_CACHES))),
        ("offload", offload("6.7B", last=FIRST_OFFLOADED)),
        ("steady", cells(lambda: steady_cells(bench, LONG, last=FIRST_SETTINGS))),
        ("latency", cells(lambda: latency_cells(bench, "6.7B"), apart=True)),
        ("storage", cells(lambda: storage_cells(bench))),
        ("tokens", tokens),
        ("generate", cells(lambda: generate_cells(bench, [COMPILED]))),
        ("offload", offload("6.7B", first=FIRST_OFFLOADED)),
        ("latency", cells(lambda: latency_cells(bench, "30B"), apart=True)),
        ("offload", offload("30B")),
        ("step", cells(lambda: step_cells(bench, with_goal=False))),
        ("served", cells(lambda: served_cells(bench, first=FIRST_SETTINGS))),
        ("served", cells(lambda: wave_cells(bench))),
        ("steady", cells(lambda: steady_cells(bench, LONG, first=FIRST_SETTINGS))),
        ("prompt", cells(lambda: prompt_cells(bench, with_goal=False))),
        ("generate", cells(lambda: generate_cells(bench, OTHER_CACHES))),
        ("profile", cells(lambda: profile_cells(bench))),
        ("kernels", cells(lambda: kernel_cells(machine))),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {FILE}")
    parser.add_argument("--minutes", type=float, help="how long the run may take; 9, or 60 with --dry-run")
    parser.add_argument("--only", help="comma-separated sections; all by default")
    parser.add_argument("--match", help="comma-separated texts; cells whose section and name hold one of them")
    parser.add_argument("--part", help="K/N: of the comparisons of tokens every N-th from the K-th on")
    parser.add_argument("--dry-run", action="store_true", help="all in small on the CPU")
    options = parser.parse_args()
    minutes = (60.0 if options.dry_run else 9.0) if options.minutes is None else options.minutes
    clock = RunClock(60 * minutes)
    machine = Machine(interpret=options.dry_run, tiny=options.dry_run)
    described = machine.describe()
    rows = RowFile(options.out / FILE, described)
    texts = options.match.split(",") if options.match else [""]
    runner = CellRunner(rows, clock, lambda line: print(line, flush=True), texts)
    runs = stages(options, machine, clock, runner)
    names = list(dict.fromkeys(name for name, _ in runs))
    chosen = options.only.split(",") if options.only else names
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: no such section; there are {', '.join(names)}")
    for name, run in runs:
        if name in chosen:
            run()
    for row in runner.ran:
        if "skipped" in row:
            print(f"{row['section']} {row['cell']}: not run: {row['skipped']}", flush=True)
    if options.part is None:
        tell_goals(options.out / FILE, described["card"])
    failed, left_out = runner.failed, runner.left_out
    print(f"failed: {', '.join(failed) or 'none'}\nleft out: {', '.join(left_out) or 'none'}", flush=True)
    return int(bool(failed) or (options.dry_run and bool(left_out)))


def tell_goals(path: Path, card: str) -> None:
    """Print what became of each goal whose rows are there."""
    for verdict in to_show(verdicts(row for row in read_rows(path) if row["card"] == card)):
        print(f"goal: {verdict.goal.section} {verdict.cell}: {verdict_text(verdict)}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
