"""Entries that KVMerger leaves of several texts with one threshold for each layer, beside a threshold for each head.

The thresholds are those at which half of the entries of the text `--calibrate` are left, and are then used as they are
on windows of other texts: `--prompt` tokens, with the KL of the next `--scored` ones from the full cache. Protected are
the same entries as at a budget of one half.

    python benchmarks/quality/merge_thresholds.py MODEL --calibrate wikitext2_valid.txt --text cpp=cpp_docs.md.txt
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from codec_texts import FULL, divergence, parser_of_texts, predictions, refuse_judged, tokens, windows
from rich.progress import track

import millpond as mp
from millpond.hf.calibration.merging import layer_thresholds
from millpond.hf.stats import CacheStats
from millpond_lab.bench.common.machine import describe_machine

#: The shares of entries that stay as they are at a budget of one half, as shares of the text.
RECENT, TOP = 0.17, 0.12
HALF = {"method": "kvmerger", "budget": "50%"}


def left(stats: CacheStats) -> list[float]:
    """The share of its entries that each layer holds."""
    seen = sum(stats.seen)
    return [sum(map(sum, layer)) / (seen * len(layer[0])) for layer in stats.stored]


def main() -> None:
    parser = parser_of_texts(__doc__)
    parser.add_argument("--calibrate", type=Path, required=True, help="a text that is not judged")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = {name: Path(path) for name, _, path in (given.partition("=") for given in args.text)}
    refuse_judged(args.calibrate, [*texts.values()])
    model, tokenizer = mp.load_model(args.model), mp.load_tokenizer(args.model)
    eps = layer_thresholds(model, tokens(tokenizer, args.calibrate), HALF["budget"], length=args.prompt)
    fixed = {"eps": ";".join(f"{one:.6f}" for one in eps), "recent": RECENT, "top": TOP, "budget": "100%"}
    settings: dict[str, dict[str, Any]] = {"layer": HALF | fixed, "head": HALF}
    rows: list[dict[str, Any]] = []
    for name, path in texts.items():
        found: dict[str, list[tuple[float, list[float]]]] = {setting: [] for setting in settings}
        for window in track(windows(tokens(tokenizer, path), args.windows, args.prompt + args.scored), name):
            full, _ = predictions(model, window, args.prompt, method="full", codec=FULL)
            for setting, options in settings.items():
                other, stats = predictions(model, window, args.prompt, codec=FULL, **options)
                found[setting].append((divergence(full, other), left(stats)))
        for setting, of in found.items():
            by_layer = [statistics.mean(layer) for layer in zip(*(shares for _, shares in of), strict=True)]
            row = {"text": name, "thresholds": setting, "kl": [kl for kl, _ in of], "left": by_layer}
            rows.append(row | {"left in windows": [statistics.mean(shares) for _, shares in of]})
            print(name, setting, f"{statistics.mean(row['kl']):.4f}", f"{statistics.mean(by_layer):.1%}", flush=True)
    about = {"model": args.model, "prompt": args.prompt, "scored": args.scored, "windows": args.windows}
    report = about | {"calibrated on": args.calibrate.name, "eps": eps, "rows": rows}
    args.out.write_text(json.dumps(report | {"machine": asdict(describe_machine())}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
