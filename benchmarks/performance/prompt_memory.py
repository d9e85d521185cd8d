"""Peak memory of generate() on a long prompt: our caches and transformers' own, each in a fresh process.

    python benchmarks/performance/prompt_memory.py [--prompt 4096] [--chunk 512] [--runs 3]
        [--model FOLDER] [--heads FILE] [--json FILE]

A process builds the model, makes the cache, and generates two tokens; what counts is the highest resident memory
above what it held once model and cache were there. Medians over the runs, which take turns. Memory does not depend on
what else runs on the machine; the times of prefill do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from script import begin, keep
from transformers import DynamicCache

from millpond import compress
from millpond.models.load import load_model
from millpond_lab.bench.generate.candidates import GenerateTiming, ModelShape, draw_prompts, timed

#: Tokens between two evictions while a prompt is read.
EVERY = 256
#: The cache by name: its method (None: transformers' own), its budget, and how the prompt is read.
CACHES: dict[str, tuple[str | None, str | int | None, str]] = {
    "DynamicCache": (None, None, "default"),
    "DynamicCache, chunks": (None, None, "chunks"),
    "full": ("full", None, "default"),
    "full, whole": ("full", None, "whole"),
    "full, chunks": ("full", None, "chunks"),
    "h2o 20%": ("h2o", "20%", "default"),
    "h2o 20%, whole": ("h2o", "20%", "whole"),
    "h2o 20%, chunks": ("h2o", "20%", "chunks"),
    "keydiff 2048, evicting": ("keydiff", 2048, "evicting"),
    "locret 2048, evicting": ("locret", 2048, "evicting"),
}
#: Of one of these caches the script needs --heads.
TRAINED = "locret"
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def measure(name: str, args: argparse.Namespace, shape: ModelShape) -> GenerateTiming:
    """One cache in this process."""
    method, budget, reading = CACHES[name]
    dtype = DTYPES[args.dtype]
    model: Any = load_model(args.model, args.dtype) if args.model else shape.build().to(dtype)
    prompts = draw_prompts(replace(shape, vocab=model.config.vocab_size), 1, args.prompt, seed=0)
    chunks = {"prefill_chunk_size": args.chunk}
    given = {"default": {}, "whole": {"prefill_chunk_size": None}, "chunks": chunks, "evicting": chunks}
    options: dict[str, Any] = {"prefill": "chunks", "chunk": EVERY} if reading == "evicting" else {}
    if method == TRAINED:
        options["heads"] = args.heads
    if method is None:
        return timed(model, prompts, args.new, DynamicCache(config=model.config), lambda: 0, **given[reading])
    with compress(model, method, budget, **options) as cache:
        return timed(model, prompts, args.new, cache, lambda: cache.stats().kv_bytes, **given[reading])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512, help="Tokens of a pass, where the prompt comes in chunks.")
    parser.add_argument("--new", type=int, default=2)
    parser.add_argument("--model", help="A folder; without it a random Llama of 168M parameters.")
    parser.add_argument("--heads", help="A file of 'millpond train retain' for the model, for 'locret'.")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=CACHES, action="append", help="One cache; may be given several times.")
    parser.add_argument("--child", choices=CACHES, help=argparse.SUPPRESS)
    args, shape = begin(parser)
    if args.child:
        print(json.dumps(asdict(measure(args.child, args, shape))))
        return
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    names = args.only or [name for name, (method, _, _) in CACHES.items() if method != TRAINED or args.heads]
    for _ in range(args.runs):
        for name in names:
            found[name].append(_in_a_process(name))
            last = found[name][-1]
            print(f"{name:24} {last['peak_bytes'] / 1e6:6.0f} MB {last['prefill_s']:6.1f} s", flush=True)
    rows = [
        {
            "cache": name,
            "peak_bytes": statistics.median(run["peak_bytes"] for run in runs),
            "prefill_s": statistics.median(run["prefill_s"] for run in runs),
            "runs": runs,
        }
        for name, runs in found.items()
    ]
    args.model, args.heads = (name and Path(name).name for name in (args.model, args.heads))
    print("medians")
    for row in rows:
        print(f"{row['cache']:24} {row['peak_bytes'] / 1e6:6.0f} MB {row['prefill_s']:6.1f} s")
    keep(args, rows)


def _in_a_process(name: str) -> dict[str, Any]:
    given = [arg for arg in sys.argv[1:] if arg != "--child"]
    child = subprocess.run(
        [sys.executable, __file__, *given, "--child", name], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
