"""Time to the first token of a prompt of stored chunks, against the same prompt computed in full.

Usage: python benchmarks/performance/chunk_first_token.py TEXT [--model smollm2-135m] [--chunks 8] [--tokens 256]
    [--suffix 32] [--repeats 3] [--threads 1] [--dtype bf16] [--folder DIR] [--out benchmarks/results/chunk-first-token]

Chunks are stored behind their neighbours, where a second run with the same --folder finds them; then prompts hold them
in another order at each repeat. "Plain" is recompute=1. "Disk" has a memory tier of one byte; the file cache of the
system is warm. Times are from the arrival of a request to its first token; the table has the median and the extremes of
the repeats.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import millpond as mp
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table


def first_token_s(llm: mp.LLM, prompt: mp.Prompt, recompute: Any) -> tuple[float, float]:
    """Seconds to the first token, and the share of the prompt that was computed."""
    params, cache = mp.SamplingParams(max_tokens=1, temperature=0), mp.CacheOptions(recompute=recompute)
    (out,) = llm.generate(prompt, params, cache=cache)
    kv = out.completions[0].kv
    assert out.times.first_token is not None and out.times.started is not None and kv is not None  # noqa: PT018
    return out.times.first_token - out.times.arrived, 1 - kv.reused_tokens / kv.seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    for name, value in (("chunks", 8), ("tokens", 256), ("suffix", 32), ("repeats", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = mp.load_tokenizer(args.model)
    text = args.text.read_text(encoding="utf-8")[:200_000]
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    cuts = range(0, args.chunks * args.tokens, args.tokens)
    chunks = [tuple(ids[begin : begin + args.tokens]) for begin in cuts]
    end = tuple(ids[-args.suffix :])
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[tuple[float, float]]] = {}
        for tier, memory in (("memory", "4GiB"), ("disk", 1)):
            store = mp.ChunkStore(folder, memory=memory, disk="20GiB")
            with mp.LLM(
                args.model, method="full", dtype=args.dtype, chunk_store=store, max_step_tokens=args.step_tokens
            ) as llm:
                for n, chunk in enumerate(chunks):
                    llm.generate(mp.Prompt([chunks[n - 1], mp.Chunk(chunk), end]), mp.SamplingParams(max_tokens=1))
                for repeat in range(args.repeats):
                    order = random.Random(repeat).sample(chunks, len(chunks))
                    prompt = mp.Prompt([*(mp.Chunk(chunk) for chunk in order), end])
                    for name, recompute in (("plain", 1), ("15 %", 0.15), ("0 %", 0)):
                        if tier == "memory" or name != "plain":
                            setting = name if name == "plain" else f"{name}, {tier}"
                            found.setdefault(setting, []).append(first_token_s(llm, prompt, recompute))
                            print(setting, found[setting][-1], flush=True)
    plain = statistics.median(seconds for seconds, _ in found["plain"])
    rows, data = [], []
    for name, values in found.items():
        times = sorted(seconds for seconds, _ in values)
        middle = statistics.median(times)
        share = statistics.mean(share for _, share in values)
        rows.append(
            (name, f"{share:.0%}", f"{middle:.2f} ({times[0]:.2f} to {times[-1]:.2f})", f"{middle / plain:.2f}")
        )
        data.append({"setting": name, "computed": share, "seconds": times, "of_plain": middle / plain})
    table = markdown_table(("computed again, chunks in", "of the prompt computed", "s to first token", "x plain"), rows)
    print(table)
    if args.out is not None:
        settings = {
            k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in ("out", "folder")
        }
        settings["text"] = args.text.name
        report = describe_machine().header("chunk-first-token") | {"settings": settings, "rows": data}
        args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        page = f"# Time to the first token with stored chunks\n\n{args.model}, {args.dtype}, {args.threads} threads, "
        page += f"{args.chunks} x {args.tokens} tokens and {args.suffix}; median and extremes of {args.repeats}.\n\n"
        args.out.with_suffix(".md").write_text(f"{page}{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
