"""InfLLM in an engine whose memory is limited: blocks in the pool, and outside of it in files.

Usage: python benchmarks/performance/infllm_blocks.py TEXT [--model smollm2-135m] [--requests 4] [--tokens 768]
    [--new 8] [--kv-memory 80MB] [--budget 384] [--threads 1] [--out benchmarks/results/infllm-blocks]

Requests with prompts from evenly spaced places of the text are added together and answered greedily. Each setting is
measured once; rows that the file of --out has of the same settings are not measured again. Tokens are those of the
answers over the CPU seconds of the steps in which no prompt was read; bytes are those of keys and values that left the
pool, and that lookups read from outside, in their form there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import millpond as mp
from millpond.cache.far_blocks import BlockFormat, FarBlocks
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.scheduler import Step
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table

OPTIONS = {"sinks": 16, "local": 96, "block": 64, "together": 128}
#: Name -> where blocks lie, and their number format.
SETTINGS = {"pool": ("none", "auto"), "disk": ("disk", "auto"), "disk, int8": ("disk", "int8")}


def measure(model: Any, prompts: list[tuple[int, ...]], offload: str, codec: str, args: argparse.Namespace) -> Any:
    """One row: requests at once, seconds, tokens per second, and bytes."""
    moved: Counter[str] = Counter()
    read, put = FarBlocks.read, BlockFormat.put

    def reading(far: FarBlocks, ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        moved["read"] += far.nbytes // far.n * len(ids)
        return read(far, ids, device)

    def putting(form: BlockFormat, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        moved["written"] += sum(part.nbytes for part in stored)
        return put(form, stored)

    seconds: Counter[str] = Counter()
    last = [time.process_time()]
    params = mp.SamplingParams(max_tokens=args.new, temperature=0, ignore_eos=True)

    def on_step(step: Step, _: float) -> None:
        part, now = "reading" if step.prefills else "decoding", time.process_time()
        seconds[part] += now - last[0]
        last[0] = now
        seconds[f"{part} tokens"] += len(step.decodes)

    engine = Engine(
        model,
        method="infllm",
        options=OPTIONS | {"offload": offload},
        budget=args.budget,
        codec=codec,
        kv_memory=args.kv_memory,
        max_step_tokens=256,
    )
    engine.on_step = on_step
    tokens: dict[str, tuple[int, ...]] = {}
    at_once = peak = 0
    began, cpu = time.perf_counter(), time.process_time()
    with mock.patch.object(FarBlocks, "read", reading), mock.patch.object(BlockFormat, "put", putting):
        for number, ids in enumerate(prompts):
            engine.add(Request(request_id=str(number), prompt=ids, params=params))
        while engine.busy:
            for output in engine.step():
                if output.finished:
                    tokens[output.request_id] = output.completions[0].token_ids
            at_once, peak = max(at_once, engine.stats().running), max(peak, engine.stats().kv_bytes)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    engine.close()
    count = len(prompts) * args.new
    return {
        "at_once": at_once,
        "seconds": wall,
        "cpu_seconds": cpu,
        "decode_tokens_per_cpu_s": seconds["decoding tokens"] / max(seconds["decoding"], 1e-9),
        "pool_bytes": peak,
        "written_bytes": moved["written"],
        "read_bytes_per_token": moved["read"] / count,
        "tokens": [list(tokens[name]) for name in sorted(tokens)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv-memory", default="80MB")
    for name, value in (("requests", 4), ("tokens", 768), ("new", 8), ("budget", 384), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "text")}
    settings |= {"text": args.text.name, "options": OPTIONS}
    rows: dict[str, Any] = {}
    file = None if args.out is None else args.out.with_suffix(".json")
    if file is not None and file.exists():
        held = json.loads(file.read_text(encoding="utf-8"))
        rows = held["rows"] if held["settings"] == settings else {}
    model = mp.load_model(args.model, "f32")
    tokenizer = mp.load_tokenizer(args.model)
    text = args.text.read_text(encoding="utf-8")[:400_000]
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    begins = range(0, args.requests * (len(ids) // args.requests), len(ids) // args.requests)
    prompts = [tuple(ids[begin : begin + args.tokens]) for begin in begins]
    for name, (offload, codec) in SETTINGS.items():
        if name not in rows:
            rows[name] = measure(model, prompts, offload, codec, args)
            print(name, {key: value for key, value in rows[name].items() if key != "tokens"}, flush=True)
            if file is not None:
                report = describe_machine().header("infllm-blocks") | {"settings": settings, "rows": rows}
                file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    table = shown(rows)
    print(table)
    if args.out is not None:
        page = f"# InfLLM with blocks outside of the pool\n\n{args.model}, float32, {args.requests} requests of "
        page += f"{args.tokens} tokens and {args.new} new ones, budget {args.budget}, {args.kv_memory} for caches, "
        page += f"{args.threads} threads; {describe_machine().hardware}.\n\n{table}"
        args.out.with_suffix(".md").write_text(page, encoding="utf-8")


def shown(rows: dict[str, Any]) -> str:
    """The table of the rows."""
    head = (
        "blocks in",
        "at once",
        "CPU s",
        "tokens a CPU second, decoding",
        "MB in the pool",
        "MB written",
        "MB read a token",
        "same",
    )
    first = next(iter(rows.values()))["tokens"]
    lines = []
    for name, row in rows.items():
        same = sum(one == other for one, other in zip(row["tokens"], first, strict=True))
        numbers = (row["pool_bytes"], row["written_bytes"], row["read_bytes_per_token"])
        lines.append(
            (
                name,
                str(row["at_once"]),
                f"{row['cpu_seconds']:.0f}",
                f"{row['decode_tokens_per_cpu_s']:.2f}",
                *(f"{number / 1e6:.1f}" for number in numbers),
                f"{same} of {len(first)}",
            )
        )
    return markdown_table(head, lines)


if __name__ == "__main__":
    main()
