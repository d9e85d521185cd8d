"""OPT-6.7B and OPT-30B shapes inside 16 GB of a CUDA GPU, the rest on the host: ours with several caches, Accelerate.

    PYTHONPATH=src python benchmarks/gpu/gpu_offload.py --engine "h2o 20%" --folder DIR [--new 32] [--memory 16GB]

The weights, 13.3 or 60 GB in bf16, are written to a folder once. Each cell is a process of its own, in which torch's
allocator may not take more than `--memory` of the GPU, all of it counted: distinct prompts of 512 tokens, answers of
32 or 512. Ours runs as many requests as its plan says, at most 256; `full` has all caches on the GPU, and its plan by
FlexGen's search may put caches and their attention on the host too. Accelerate runs batches of 4 and 16, and keeps
layers on the GPU for which `ACCELERATE_WEIGHTS` of the memory has room, so that its cache fits in the rest.
`--steps` ends a run after that many steps in which all decode: the rest of the answers is projected from them.
--tiny: a small model, on whatever device there is: a test of this script, not of speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from gpu_bounds import Rates
from gpu_machine import Machine
from gpu_rows import Cell, Row, read_rows
from gpu_settings import H2O, H2O_CODES, SETTINGS
from gpu_shapes import opt_6_7b, opt_30b, parameter_bytes
from gpu_weights import NoRoom, WeightFolder, free_memory
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

import millpond as mp
from millpond.budget import parse_bytes
from millpond.engine.request import Request

PROMPT, MOST = 512, 256
MEMORY = "16GB"
#: Of the memory; the rest is for the cache and activations.
ACCELERATE_WEIGHTS = 0.6
#: Share of the host's free memory for weights and caches in FlexGen's search.
HOST_SHARE = 0.7
SEARCHED = "full by FlexGen's search"
OURS: dict[str, dict[str, Any]] = {
    H2O: SETTINGS[H2O],
    "full": SETTINGS["full"],
    SEARCHED: SETTINGS["full"],
    H2O_CODES: SETTINGS[H2O_CODES],
}
BATCHES = {"accelerate 4": 4, "accelerate 16": 16}
SHAPES: dict[str, Callable[[bool], Any]] = {"6.7B": opt_6_7b, "30B": opt_30b}
#: Steps of answers that are projected.
STEPS = 20
#: A cell of so many seconds has a shorter one that projects the same, from which its name differs.
LONG_S, TO_ITS_END = 400.0, ", to its end"


class Case(NamedTuple):
    """A cell: tokens of an answer, how many steps are timed (0: all), and seconds that it takes, about."""

    engine: str
    new: int
    steps: int
    seconds: float


CASES: dict[str, tuple[Case, ...]] = {
    "6.7B": (
        Case(H2O, 32, 0, 50.0),  # with the writing of the weights
        Case("full", 32, 0, 30.0),
        Case("accelerate 4", 32, 0, 50.0),
        Case(H2O, 512, 0, 70.0),
        Case("full", 512, 0, 70.0),
        Case("accelerate 4", 512, STEPS, 1.0),
        Case(SEARCHED, 32, 0, 80.0),
        Case("accelerate 16", 32, 0, 50.0),
        Case("accelerate 16", 512, STEPS, 1.0),
        Case(H2O_CODES, 512, 0, 90.0),
        Case(SEARCHED, 512, 0, 120.0),
        Case("accelerate 4", 512, 0, 420.0),
    ),
    "30B": (
        Case(H2O, 32, 0, 200.0),
        Case("full", 32, 0, 130.0),
        Case(H2O, 512, STEPS, 130.0),
        Case("full", 512, STEPS, 110.0),
        Case("accelerate 4", 32, 0, 300.0),
        Case("accelerate 4", 512, STEPS, 1.0),
        Case(SEARCHED, 512, STEPS, 190.0),
    ),
}
_WEIGHTS = WeightFolder()


def offload_cells(machine: Machine, rates: Callable[[], Rates], size: str, rows: Path) -> list[Cell]:
    """Every engine on one of the models, in a process of its own; the first one writes the model.

    Args:
        rates: of the device, when they are needed. rows: the file of this run, in which steps of Accelerate are found.
    """
    cases = CASES[size]
    if machine.tiny:
        few = (0, 2, 5) if size == "6.7B" else (2,)  # each way of running once
        cases = tuple(cases[n] for n in few)
    found = []
    for case in cases:
        name = f"{size}, {case.engine}, {PROMPT} + {case.new}{TO_ITS_END if case.seconds > LONG_S else ''}"
        run = partial(in_process, machine, rates, size, case)
        if case.steps and case.engine in BATCHES:
            run = partial(projected_from, rows, f"{size}, {case.engine}, {PROMPT} + 32", case.new)
        found.append(Cell("offload", name, run, case.seconds))
    return found


def in_process(machine: Machine, rates: Callable[[], Rates], size: str, case: Case) -> Row:
    """A cell in a process of its own, so that its memory has a limit.

    Raises:
        RuntimeError: it failed; the end of what it said.
    """
    try:
        folder = _WEIGHTS.of(SHAPES[size], machine.tiny, machine.device)
    except NoRoom as error:
        return {"skipped": str(error)}
    command = [sys.executable, __file__, "--engine", case.engine, "--folder", str(folder)]
    command += ["--new", str(case.new), "--steps", str(case.steps), *(["--tiny"] if machine.tiny else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120 + 3 * case.seconds)
    found = [line for line in done.stdout.splitlines() if line.startswith("CELL ")]
    if not found:
        raise RuntimeError(done.stderr[-700:])
    row = dict(json.loads(found[0][5:]))
    weights = parameter_bytes(SHAPES[size](machine.tiny))
    link_s = max(weights - parse_bytes(MEMORY), 0) / rates().upload_bytes_per_s
    bound_ms = max(link_s, weights / rates().copy_bytes_per_s) * 1e3
    return row | {
        "bound_ms": bound_ms,
        "bound_of": "a step's weights: an upload of those that do not fit, all read once",
    }


def projected_from(rows: Path, measured: str, new: int) -> Row:
    """Longer answers of Accelerate, from the steps of shorter ones: both copy the same weights in each."""
    found = [row for row in read_rows(rows) if row["cell"] == measured and "step_ms" in row]
    if not found:
        return {"skipped": f"its steps are those of `{measured}`, which has not run"}
    row = found[-1]
    found_too = {name: row[name] for name in ("memory", "bound_ms", "bound_of")}
    return projected(row["requests"], new, row["prompt_s"], row["step_ms"] / 1e3, STEPS) | found_too


def projected(n: int, new: int, prompt_s: float, step_s: float, steps: int) -> Row:
    """Tokens a second of answers that were not written to their end."""
    return {
        "requests": n,
        "prompt_s": prompt_s,
        "step_ms": step_s * 1e3,
        "tokens_per_s": n * new / (prompt_s + new * step_s),
        "projected": f"{steps} steps behind real prompts",
    }


# ---------------------------------------------------------------------- in the process of a cell


def ours(folder: Path, options: argparse.Namespace) -> Row:
    """Our engine, with the plan that it makes."""
    prompt, new = (64, 8) if options.tiny else (PROMPT, options.new)
    cuda = torch.cuda.is_available()
    given: dict[str, Any] = {}
    if cuda:
        given = {"device": "cuda", "device_memory": options.memory, "prompt_tokens": prompt, "new_tokens": new}
        if options.engine == SEARCHED:
            given["memory"] = int(HOST_SHARE * free_memory())
    params = mp.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    with mp.LLM(folder, max_running=MOST, max_step_tokens=2048, **given, **OURS[options.engine]) as llm:
        opened = time.perf_counter() - began
        n = 4 if options.tiny else planned_requests(llm)
        prompts = [torch.randint(2, 500, (prompt,)).tolist() for _ in range(n)]
        began = time.perf_counter()
        for number, ids in enumerate(prompts):
            llm.engine.add(Request(request_id=str(number), prompt=tuple(ids), params=params))
        prompt_s, times = run_steps(llm, n, options.steps)
        spent = time.perf_counter() - began
        llm.engine.abort_all()
        said = str(llm.plan)[:400]
    step_s = median(times)
    common: Row = {"plan": said, "open_s": opened, "run_s": spent}
    if options.steps:
        return common | projected(n, new, prompt_s, step_s, len(times))
    row: Row = {"requests": n, "prompt_s": prompt_s, "step_ms": step_s * 1e3, "tokens_per_s": n * new / spent}
    return common | row


def planned_requests(llm: mp.LLM) -> int:
    """How many requests the plan lets run together."""
    assert llm.plan is not None, "a model in limited memory has one"
    said = str(llm.plan)
    return llm.plan.plan.block or (int(said.split("at most ")[1].split(" ")[0]) if "at most " in said else MOST)


def run_steps(llm: mp.LLM, n: int, steps: int) -> tuple[float, list[float]]:
    """Run the requests to their end, or until all have decoded for some steps.

    Returns:
        Seconds until all decode, and of each step in which all did; those of all steps where they never did.
    """
    began, prompt_s = time.perf_counter(), 0.0
    every, together = list[float](), list[float]()
    while llm.engine.busy and not (steps and len(together) >= steps):
        before = time.perf_counter()
        outputs = llm.engine.step()
        every.append(time.perf_counter() - before)
        if sum(bool(output.completions[0].token_ids) for output in outputs) < n:
            continue
        if not prompt_s:
            prompt_s = time.perf_counter() - began
            continue
        together.append(every[-1])
    return prompt_s, together or every


class StepTimes(StoppingCriteria):
    """Notes when each token of generate() was there, and never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.BoolTensor:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


def accelerate(folder: Path, options: argparse.Namespace) -> Row:
    """Accelerate's dispatch of layers, with transformers' own cache on the GPU."""
    prompt, new = (64, 8) if options.tiny else (PROMPT, options.new)
    batch, device = BATCHES[options.engine], "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    weights = int(parse_bytes(options.memory) * ACCELERATE_WEIGHTS)
    placed: dict[str, Any] = {"device_map": "auto", "max_memory": {0: weights, "cpu": 1 << 37}}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, **(placed if device == "cuda" else {})
    )
    opened = time.perf_counter() - began
    ids, times = torch.randint(2, 500, (batch, prompt), device=device), StepTimes()
    began = time.perf_counter()
    model.generate(
        ids,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        disable_compile=True,
        stopping_criteria=StoppingCriteriaList([times]),
    )
    spent = time.perf_counter() - began
    steps = [late - early for early, late in zip(times.times, times.times[1:], strict=False)]
    row: Row = {"requests": batch, "open_s": opened, "run_s": spent, "tokens_per_s": batch * new / spent}
    return row | {"prompt_s": times.times[0] - began, "step_ms": median(steps) * 1e3}


def cell(options: argparse.Namespace) -> Row:
    """One cell, in this process."""
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_bytes(options.memory) / whole)
    run = ours if options.engine in OURS else accelerate
    found = run(options.folder, options) | {"memory": options.memory}
    if torch.cuda.is_available():
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default=MEMORY)
    parser.add_argument("--folder", type=Path, required=True, help="of the model")
    parser.add_argument("--engine", choices=[*OURS, *BATCHES], required=True)
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=0, help="steps that are timed; 0: all")
    parser.add_argument("--tiny", action="store_true")
    print("CELL " + json.dumps(cell(parser.parse_args())))


if __name__ == "__main__":
    main()
