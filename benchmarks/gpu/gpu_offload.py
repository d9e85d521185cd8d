"""An OPT-6.7B shape inside 16 GB of a CUDA GPU: ours with several caches, and Accelerate.

    PYTHONPATH=src python benchmarks/gpu/gpu_offload.py --cell h2o --folder DIR [--memory 16GB] [--tiny]

The weights, 13.3 GB in bf16, are written to a folder once. Each cell is a process of its own, in which torch's
allocator may not take more than `--memory` of the GPU, all of it counted: distinct prompts of 512 tokens, answers of
32. Ours runs as many requests as its plan says, at most 128; Accelerate batches of 4 and 16, and keeps layers on the
GPU for which `ACCELERATE_WEIGHTS` of the memory has room, so that its cache fits in the rest.
--tiny: a small model, on whatever device there is: a test of this script, not of speed.
"""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from gpu_machine import Machine
from gpu_rows import Cell, Row
from gpu_shapes import opt_6_7b, random_model
from transformers import AutoModelForCausalLM

import millpond as mp
from millpond.budget import parse_bytes
from millpond.engine.request import Request

PROMPT, NEW, MOST = 512, 32, 128
MEMORY = "16GB"
#: Of the memory; the rest is for the cache and activations.
ACCELERATE_WEIGHTS = 0.6
OURS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "h2o 20%": {"method": "h2o", "budget": "20%"},
    "h2o 20%, int4": {"method": "h2o", "budget": "20%", "codec": "int4"},
}
BATCHES = {"accelerate, 4": 4, "accelerate, 16": 16}
#: Seconds of a cell at most.
LIMIT_S = 150.0


def offload_cells(machine: Machine) -> list[Cell]:
    """Every engine, in a process of its own; the first one writes the model."""
    names = ["h2o 20%", "accelerate, 4"] if machine.tiny else [*OURS, *BATCHES]
    return [Cell("offload", name, partial(in_process, machine, name), 45.0) for name in names]


@cache
def model_folder(tiny: bool) -> Path:
    """A folder with the random model, which goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="millpond-opt-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random_model(opt_6_7b(tiny), device).cpu().save_pretrained(folder)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return folder


def in_process(machine: Machine, name: str) -> Row:
    """A cell in a process of its own, so that its memory has a limit.

    Raises:
        RuntimeError: it failed; the end of what it said.
    """
    command = [sys.executable, __file__, "--cell", name, "--folder", str(model_folder(machine.tiny))]
    done = subprocess.run(
        [*command, *(["--tiny"] if machine.tiny else [])], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("CELL ")]
    if not found:
        raise RuntimeError(done.stderr[-700:])
    return dict(json.loads(found[0][5:]))


def ours(folder: Path, name: str, memory: str, tiny: bool) -> Row:
    """Our engine, with the plan that it makes."""
    prompt, new = (64, 8) if tiny else (PROMPT, NEW)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {"device": device, "device_memory": memory} if device == "cuda" else {}
    params = mp.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    with mp.LLM(
        folder,
        prompt_tokens=prompt if given else None,
        new_tokens=new if given else None,
        max_running=MOST,
        max_step_tokens=2048,
        **given,
        **OURS[name],
    ) as llm:
        opened = time.perf_counter() - began
        said = str(llm.plan)
        n = 4 if tiny else int(said.split("at most ")[1].split(" ")[0]) if "at most " in said else MOST
        prompts = [torch.randint(2, 500, (prompt,)).tolist() for _ in range(n)]
        began, steps = time.perf_counter(), []
        for number, ids in enumerate(prompts):
            llm.engine.add(Request(request_id=str(number), prompt=tuple(ids), params=params))
        while llm.engine.busy:
            before = time.perf_counter()
            llm.engine.step()
            steps.append(time.perf_counter() - before)
        spent = time.perf_counter() - began
        predicted = None if llm.plan is None else llm.plan.plan.prediction
    steps = sorted(steps[-new // 2 :])
    row: Row = {
        "plan": said[:400],
        "requests": n,
        "open_s": opened,
        "run_s": spent,
        "tokens_per_s": n * new / spent,
        "step_ms": steps[len(steps) // 2] * 1e3,
    }
    if predicted is not None:
        row |= {"bound_tokens_per_s": predicted.tokens_per_s, "ratio": predicted.tokens_per_s / row["tokens_per_s"]}
        row["bound_of"] = "the plan's prediction"
    return row


def accelerate(folder: Path, batch: int, memory: str, tiny: bool) -> Row:
    """Accelerate's dispatch of layers, with transformers' own cache on the GPU."""
    prompt, new = (64, 8) if tiny else (PROMPT, NEW)
    began = time.perf_counter()
    weights = int(parse_bytes(memory) * ACCELERATE_WEIGHTS)
    placed: dict[str, Any] = {"device_map": "auto", "max_memory": {0: weights, "cpu": 1 << 37}}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, **(placed if torch.cuda.is_available() else {})
    )
    opened = time.perf_counter() - began
    ids = torch.randint(2, 500, (batch, prompt), device="cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {"do_sample": False, "disable_compile": True}
    began = time.perf_counter()
    model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)
    spent = time.perf_counter() - began
    return {"requests": batch, "open_s": opened, "run_s": spent, "tokens_per_s": batch * new / spent}


def cell(options: argparse.Namespace) -> Row:
    """One cell, in this process."""
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_bytes(options.memory) / whole)
    if options.cell in OURS:
        found = ours(options.folder, options.cell, options.memory, options.tiny)
    else:
        found = accelerate(options.folder, BATCHES[options.cell], options.memory, options.tiny)
    found["memory"] = options.memory
    if torch.cuda.is_available():
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default=MEMORY)
    parser.add_argument("--folder", type=Path, required=True, help="of the model")
    parser.add_argument("--cell", choices=[*OURS, *BATCHES], required=True)
    parser.add_argument("--tiny", action="store_true")
    print("CELL " + json.dumps(cell(parser.parse_args())))


if __name__ == "__main__":
    main()
