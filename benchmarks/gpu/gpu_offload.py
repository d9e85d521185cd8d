"""A model that a CUDA GPU holds in part: ours with several caches, and Accelerate, inside the same memory of the GPU.

    PYTHONPATH=src python benchmarks/gpu/gpu_offload.py --out FILE [--memory 8GiB] [--folder DIR] [--cells full,h2o,...]

Weights of a random Llama of the shape of an 8B model (16 GB in bf16) are written to a folder. Each cell is a process of
its own, in which torch's allocator may not take more than `--memory` of the GPU, all of it counted: distinct prompts of
512 tokens, answers of 32. Ours runs as many requests as its plan says, at most 128; Accelerate batches of 16 and 64.
Accelerate keeps layers on the GPU for which `--accelerate-weights` has room, so that its cache fits in the rest.
--tiny: a small model, on whatever device there is: a test of this script, not of speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import millpond as mp
from millpond.budget import parse_bytes
from millpond.engine.request import Request

PROMPT, NEW, MOST = 512, 32, 128
OURS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "h2o": {"method": "h2o", "budget": "20%"},
    "h2o-int4": {"method": "h2o", "budget": "20%", "codec": "int4"},
}
BATCHES = {"accelerate-16": 16, "accelerate-64": 64}


def make(folder: Path, tiny: bool) -> None:
    """Write a random model."""
    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=512 if tiny else 128_256, hidden_size=64 if tiny else 4096,
        intermediate_size=128 if tiny else 14_336, num_hidden_layers=4 if tiny else 32,
        num_attention_heads=4 if tiny else 32, num_key_value_heads=2 if tiny else 8, max_position_embeddings=8192,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = LlamaForCausalLM(config)
    model.cpu().save_pretrained(folder)


def ours(folder: Path, name: str, memory: str, tiny: bool) -> dict[str, Any]:
    """Our engine, with the plan that it makes."""
    prompt, new = (64, 8) if tiny else (PROMPT, NEW)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {"device": device, "device_memory": memory} if device == "cuda" else {}
    params = mp.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    with mp.LLM(
        folder, prompt_tokens=prompt if given else None, new_tokens=new if given else None, max_running=MOST,
        max_step_tokens=2048, **given, **OURS[name],
    ) as llm:  # fmt: skip
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
    steps = sorted(steps[-new // 2 :])
    return {
        "plan": said, "requests": n, "open_s": opened, "seconds": spent, "tokens_per_s": n * new / spent,
        "step_ms": steps[len(steps) // 2] * 1e3,
    }  # fmt: skip


def accelerate(folder: Path, batch: int, weights: str, tiny: bool) -> dict[str, Any]:
    """Accelerate's dispatch of layers, with transformers' own cache on the GPU."""
    prompt, new = (64, 8) if tiny else (PROMPT, NEW)
    began = time.perf_counter()
    placed: dict[str, Any] = {"device_map": "auto", "max_memory": {0: parse_bytes(weights), "cpu": 1 << 37}}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, **(placed if torch.cuda.is_available() else {})
    )
    opened = time.perf_counter() - began
    ids = torch.randint(2, 500, (batch, prompt), device="cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {"do_sample": False, "disable_compile": True}
    began = time.perf_counter()
    model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)
    spent = time.perf_counter() - began
    return {"requests": batch, "open_s": opened, "seconds": spent, "tokens_per_s": batch * new / spent}


def cell(options: argparse.Namespace) -> dict[str, Any]:
    """One cell, in this process."""
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_bytes(options.memory) / whole)
    if options.cell in OURS:
        found = ours(options.folder, options.cell, options.memory, options.tiny)
    else:
        found = accelerate(options.folder, BATCHES[options.cell], options.accelerate_weights, options.tiny)
    if torch.cuda.is_available():
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--accelerate-weights", default="4GiB")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--cells", default=",".join([*OURS, *BATCHES]))
    parser.add_argument("--cell", help="run this one alone, and print it")
    parser.add_argument("--make", action="store_true", help="write the model to --folder, and end")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.cell:
        print("CELL " + json.dumps(cell(options)))
        return
    folder = options.folder or Path(tempfile.mkdtemp())
    if not (folder / "config.json").exists():
        make(folder, options.tiny)
    if options.make:
        return
    rows = []
    for name in options.cells.split(","):
        command = [
            sys.executable, __file__, "--cell", name, "--folder", str(folder), "--memory", options.memory,
            "--accelerate-weights", options.accelerate_weights, *(["--tiny"] if options.tiny else []),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = [line for line in done.stdout.splitlines() if line.startswith("CELL ")]
        row = {"cell": name, **(json.loads(found[0][5:]) if found else {"failure": done.stderr[-1500:]})}
        rows.append(row)
        print(row, flush=True)
        if options.out:
            name_of = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
            options.out.write_text(
                json.dumps({"device": name_of, "memory": options.memory, "cells": rows}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
