"""A long text through one small cache: perplexity, bytes and time of a pass, kept every few passes.

    long_stream.py --model FOLDER --method streaming --budget 512 --tokens 1000000 --rows 128 --out OUT.jsonl TEXT...

The texts follow each other without a seam. A pass reads `rows` tokens, so the first of them sees up to `budget` kept
entries and the last also those of its own pass; `--rows 1` is decoding, a token at a time. A line is added to OUT after
every `--keep` tokens: a run that is stopped leaves what it has measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millpond.hf.compress import compress
from millpond.models.load import load_model, load_tokenizer, resolve
from millpond_lab.bench.common.machine import describe_machine, resident_bytes
from millpond_lab.evals.spec import parse_specs


def read(model: str, texts: list[Path], tokens: int) -> Tensor:
    """(1, tokens + 1) ids of the texts, one after the other."""
    text = "".join(path.read_text(encoding="utf-8") for path in texts)
    ids = torch.tensor(load_tokenizer(model)(text).input_ids)
    if len(ids) <= tokens:
        raise SystemExit(f"the texts have {len(ids):,} tokens, --tokens {tokens:,} needs one more than that")
    return ids[None, : tokens + 1]


@torch.inference_mode()
def stream(model: Any, ids: Tensor, method: str, budget: int, rows: int, keep: int) -> Iterator[dict[str, Any]]:
    """One record per `keep` tokens: loss of every pass (summed, in nats), its median time, and what is held."""
    (spec,) = parse_specs(method, "methods")
    losses, times = [], []
    with compress(model, spec.name, budget, **spec.options) as cache:
        for begin in range(0, ids.shape[1] - 1, rows):
            end = min(begin + rows, ids.shape[1] - 1)
            before = time.perf_counter()
            logits = model(ids[:, begin:end], cache=cache).logits
            times.append(1e3 * (time.perf_counter() - before))
            losses.append(
                float(
                    torch.nn.functional.cross_entropy(logits[0].float(), ids[0, begin + 1 : end + 1], reduction="sum")
                )
            )
            if len(losses) * rows >= keep or end == ids.shape[1] - 1:
                stats = cache.stats()
                yield {
                    "seen": stats.seen[0],
                    "losses": [round(loss, 3) for loss in losses],
                    "pass_ms": round(statistics.median(times), 3),
                    "stored": max(n for layer in stats.stored for sequence in layer for n in sequence),
                    "kv_bytes": stats.kv_bytes,
                    "reserved_bytes": stats.reserved_bytes,
                    "resident_bytes": resident_bytes(),
                }
                losses, times = [], []


@torch.inference_mode()
def windows(model: Any, ids: Tensor, count: int, length: int = 2048) -> Iterator[dict[str, Any]]:
    """The loss of tokens length/2 .. length of stretches that begin at multiples of `length` (summed, in nats)."""
    for n in range(count):
        begin = (ids.shape[1] - length - 1) * n // count // length * length
        half = begin + length // 2
        logits = model(ids[:, begin : begin + length], logits_to_keep=length // 2).logits[0].float()
        loss = torch.nn.functional.cross_entropy(logits, ids[0, half + 1 : begin + length + 1], reduction="sum")
        yield {"begin": half, "tokens": length // 2, "losses": [round(float(loss), 3)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", default="full", help="with options, as in h2o:decay=0.999")
    parser.add_argument("--budget", type=int, default=512, help="entries per KV head")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=1, help="tokens of a pass")
    parser.add_argument("--keep", type=int, default=10_000, help="tokens between two lines of the result")
    parser.add_argument("--windows", type=int, default=0, help="the reference instead: how many")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f32"], help="of the weights and the cache")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = Path(resolve(args.model))
    weights = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        weights.update(path.read_bytes())
    machine = describe_machine()
    head = {
        "model": Path(args.model).name,
        "weights_sha256": weights.hexdigest(),
        "dtype": args.dtype,
        "texts": [path.name for path in args.texts],
        "method": args.method,
        "budget": args.budget,
        "rows": args.rows,
        "tokens": args.tokens,
        "threads": args.threads,
        "hardware": machine.hardware,
        "software": machine.software,
    }
    ids = read(args.model, args.texts, args.tokens)
    model = load_model(args.model, args.dtype)
    with args.out.open("w", encoding="utf-8") as out:
        out.write(json.dumps(head) + "\n")
        streamed = stream(model, ids, args.method, args.budget, args.rows, args.keep)
        for record in windows(model, ids, args.windows) if args.windows else streamed:
            out.write(json.dumps(record) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
