"""KL divergence of number formats from the full cache on windows of several texts, and the bytes they hold.

A model reads `--prompt` tokens of a window into a cache of each format, and then predicts the next `--scored` tokens of
the text. The number is KL(full || format), in nats a token, the mean over the windows of a text. Nothing is evicted,
but by a `--method`. `--turns` reads the prompt as so many turns, each with a plan at its end. Formats with a
calibration have that of the text `--calibrate`, which no window may be of.

    python benchmarks/quality/codec_texts.py MODEL rotated4 int4 --text wiki=wikitext2_test.txt --text novel=emma.txt
    benchmarks/quality/paper_rows.sh runs it, and its neighbours, for the figures about papers on SmolLM2
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import millpond as mp
from millpond.hf.calibration.measure import calibrate
from millpond.hf.stats import CacheStats
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


def tokens(tokenizer: Any, path: Path) -> Tensor:
    """The ids (T,) of a text's beginning."""
    text = path.read_text(encoding="utf-8", errors="replace")[:MOST_CHARACTERS]
    ids: Tensor = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    return ids


def predictions(model: Any, ids: Tensor, prompt: int, turns: int = 1, **setting: Any) -> tuple[Tensor, CacheStats]:
    """Log probabilities (scored, V) behind a prompt, and what the cache held after it."""
    with mp.compress(model, **setting) as cache, torch.no_grad():
        for turn in ids[:, :prompt].chunk(turns, 1):
            model(turn, **cache_argument(cache), logits_to_keep=1)
            for layer_cache in cache.layer_caches:
                layer_cache.run_plans()
        stats = cache.stats()
        logits = model(ids[:, prompt:], **cache_argument(cache)).logits
    return logits[0].float().log_softmax(-1), stats


def divergence(full: Tensor, other: Tensor) -> float:
    """KL(full || other) of log probabilities (scored, V), in nats a token."""
    return float((full.exp() * (full - other)).sum(-1).mean())


def refuse_judged(path: Path, judged: list[Path]) -> None:
    """End where a text on which something is calibrated is one of those that are judged."""
    if path.read_bytes() in [one.read_bytes() for one in judged]:
        raise SystemExit(f"{path.name} is judged, so nothing may be calibrated on it: give another text")


def parser_of_texts(about: str | None, windows: int = 4) -> argparse.ArgumentParser:
    """Arguments of programs that judge windows of texts: a model, the texts, how many windows, and of what lengths."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--windows", type=int, default=windows)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    return parser


def main() -> None:
    parser = parser_of_texts(__doc__)
    parser.add_argument("codecs", nargs="+")
    parser.add_argument("--method", default="full")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the method")
    parser.add_argument("--budget")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--calibrate", type=Path, help="a text that is not judged")
    parser.add_argument("--calibration-windows", type=int, default=16)
    parser.add_argument("--calibration-length", type=int, default=1024)
    parser.add_argument("--name", help="of the model in the results; its own by default")
    parser.add_argument("--out", type=Path, help="JSON file that the numbers are added to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", category=UserWarning)
    texts = {name: Path(path) for name, _, path in (given.partition("=") for given in args.text)}
    if args.calibrate is not None:
        refuse_judged(args.calibrate, [*texts.values()])
    model, tokenizer = mp.load_model(args.model), mp.load_tokenizer(args.model)
    known, calibrated = None, ""
    if args.calibrate is not None:
        n, length = args.calibration_windows, args.calibration_length
        known = calibrate(model, tokens(tokenizer, args.calibrate), windows=n, length=length)
        calibrated = f"{n} windows of {length:,} tokens of {args.calibrate.name}"
    options = {name: value for name, _, value in (given.partition("=") for given in args.option)}
    setting: dict[str, Any] = {"method": args.method, "budget": args.budget, "tokenizer": tokenizer, **options}
    found: dict[str, dict[str, list[float]]] = {codec: {} for codec in args.codecs}
    shares: dict[str, list[float]] = {codec: [] for codec in args.codecs}
    for name, path in texts.items():
        ids = tokens(tokenizer, path)
        for window in track(windows(ids, args.windows, args.prompt + args.scored), description=name):
            full, _ = predictions(model, window, args.prompt, method="full", codec=FULL)
            for codec in args.codecs:
                its = known if codec.startswith("kvquant") else None
                other, stats = predictions(
                    model, window, args.prompt, args.turns, codec=codec, calibration=its, **setting
                )
                shares[codec].append(stats.kv_bytes / stats.full_kv_bytes)
                found[codec].setdefault(name, []).append(divergence(full, other))
    names = [*texts]
    held = {codec: statistics.mean(of) for codec, of in shares.items()}
    table = Table("codec", "bytes", *names, title=f"KL, nats a token, {args.windows} windows of {args.prompt:,} tokens")
    for codec, texts in found.items():
        table.add_row(codec, f"{held[codec]:.1%}", *(f"{statistics.mean(texts[name]):.4f}" for name in names))
    Console().print(table)
    if args.out is not None:
        report = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
        report["machine"] = asdict(describe_machine())
        row = {"model": args.name or args.model, "prompt": args.prompt, "scored": args.scored, "windows": args.windows}
        row |= {"method": ":".join([args.method, *args.option]), "budget": args.budget or "", "turns": args.turns}
        row["calibrated on"] = calibrated
        report["rows"] = [one for one in report["rows"] if {name: one[name] for name in row} != row]
        report["rows"].append({**row, "bytes": held, "kl": found})
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
