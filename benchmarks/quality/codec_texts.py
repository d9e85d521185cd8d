"""KL divergence of number formats from the full cache on windows of several texts, and the bytes they hold.

A model reads `--prompt` tokens of a window into a cache of each format, and then predicts the next `--scored` tokens of
the text. The number is KL(full || format), in nats a token, the mean over the windows of a text. Nothing is evicted.

    python benchmarks/quality/codec_texts.py MODEL rotated4 int4 --text wiki=wikitext2_test.txt --text novel=emma.txt
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import millpond as mp
from millpond.models.cache_argument import cache_argument
from millpond_lab.bench.common.machine import describe_machine

FULL = "auto"
#: Of a text that are tokenized.
MOST_CHARACTERS = 1_000_000


def windows(ids: Tensor, n: int, length: int) -> list[Tensor]:
    """`n` windows (1, length) of a text (T,), evenly over it."""
    if len(ids) < n * length:
        raise SystemExit(f"a text of {len(ids):,} tokens has no {n} windows of {length:,}: give fewer, or shorter ones")
    step = len(ids) // n
    return [ids[i * step : i * step + length][None] for i in range(n)]


def predictions(model: Any, ids: Tensor, prompt: int, codec: str) -> tuple[Tensor, float]:
    """Log probabilities (scored, V) behind a prompt, and the share of the full cache's bytes that is held after it."""
    with mp.compress(model, "full", codec=codec) as cache, torch.no_grad():
        model(ids[:, :prompt], **cache_argument(cache), logits_to_keep=1)
        for layer_cache in cache.layer_caches:
            layer_cache.run_plans()
        stats = cache.stats()
        logits = model(ids[:, prompt:], **cache_argument(cache)).logits
    return logits[0].float().log_softmax(-1), stats.kv_bytes / stats.full_kv_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("codecs", nargs="+")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=64)
    parser.add_argument("--name", help="of the model in the results; its own by default")
    parser.add_argument("--out", type=Path, help="JSON file that the numbers are added to")
    args = parser.parse_args()
    model, tokenizer = mp.load_model(args.model), mp.load_tokenizer(args.model)
    found: dict[str, dict[str, list[float]]] = {codec: {} for codec in args.codecs}
    shares: dict[str, float] = {}
    for given in args.text:
        name, _, path = given.partition("=")
        text = Path(path).read_text(encoding="utf-8", errors="replace")[:MOST_CHARACTERS]
        ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        for window in track(windows(ids, args.windows, args.prompt + args.scored), description=name):
            full, _ = predictions(model, window, args.prompt, FULL)
            for codec in args.codecs:
                other, shares[codec] = predictions(model, window, args.prompt, codec)
                kl = float((full.exp() * (full - other)).sum(-1).mean())
                found[codec].setdefault(name, []).append(kl)
    names = list(found[args.codecs[0]])
    table = Table("codec", "bytes", *names, title=f"KL, nats a token, {args.windows} windows of {args.prompt:,} tokens")
    for codec, texts in found.items():
        table.add_row(codec, f"{shares[codec]:.1%}", *(f"{statistics.mean(texts[name]):.4f}" for name in names))
    Console().print(table)
    if args.out is not None:
        report = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
        report["machine"] = asdict(describe_machine())
        row = {"model": args.name or args.model, "prompt": args.prompt, "scored": args.scored, "windows": args.windows}
        report["rows"] = [one for one in report["rows"] if {name: one[name] for name in row} != row]
        report["rows"].append({**row, "bytes": shares, "kl": found})
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
