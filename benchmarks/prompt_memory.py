"""Peak memory of generate() on a long prompt: our caches and transformers' own, each in a fresh process.

    python benchmarks/prompt_memory.py [--prompt 4096] [--chunk 512] [--runs 5] [--json FILE]

A process builds the model, makes the cache, and generates a few tokens; what counts is the highest resident memory
above what it held once model and cache were there. Medians over the runs, which take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict

import torch
from script import begin, keep
from transformers import DynamicCache

from millpond import compress
from millpond.bench.generate.candidates import ModelShape, draw_prompts, timed

#: The cache by name: its method (None: transformers' own), its budget, and whether the prompt comes in chunks.
CACHES = {
    "DynamicCache": (None, None, False),
    "DynamicCache, chunks": (None, None, True),
    "full": ("full", None, False),
    "full, chunks": ("full", None, True),
    "h2o 20%": ("h2o", "20%", False),
    "h2o 20%, chunks": ("h2o", "20%", True),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def measure(name: str, args: argparse.Namespace, shape: ModelShape) -> int | None:
    """Bytes of the peak above the start, of one cache in this process."""
    method, budget, chunked = CACHES[name]
    model = shape.build().to(DTYPES[args.dtype])
    prompts = draw_prompts(shape, 1, args.prompt, seed=0)
    if chunked:
        model.generation_config.prefill_chunk_size = args.chunk
    if method is None:
        return timed(model, prompts, args.new, DynamicCache(config=model.config), lambda: 0).peak_bytes
    with compress(model, method, budget) as cache:
        return timed(model, prompts, args.new, cache, lambda: 0).peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512, help="Tokens of a pass, where the prompt comes in chunks.")
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=CACHES, action="append", help="One cache; may be given several times.")
    parser.add_argument("--child", choices=CACHES, help=argparse.SUPPRESS)
    args, shape = begin(parser)
    if args.child:
        print(json.dumps(measure(args.child, args, shape)))
        return
    found: dict[str, list[int]] = defaultdict(list)
    for _ in range(args.runs):
        for name in args.only or CACHES:
            found[name].append(_in_a_process(name))
    rows = [{"cache": name, "peak_bytes": statistics.median(peaks), "runs": peaks} for name, peaks in found.items()]
    for row in rows:
        print(f"{row['cache']:24} {row['peak_bytes'] / 1e6:6.0f} MB")
    keep(args, rows)


def _in_a_process(name: str) -> int:
    given = [arg for arg in sys.argv[1:] if arg != "--child"]
    child = subprocess.run(
        [sys.executable, __file__, *given, "--child", name], check=True, stdout=subprocess.PIPE, text=True
    )
    return int(json.loads(child.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
