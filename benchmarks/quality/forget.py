"""Divergence of a cache that has forgotten a span from one that read the text without it, and from one that kept it.

Usage: python benchmarks/quality/forget.py TEXT [--model smollm2-135m] [--windows 24] [--context 768] [--span 256]
    [--next 64] [--threads 1] [--out benchmarks/results/forget]

Each window is `context` tokens of TEXT, of which `span` in the middle are forgotten, and the `next` ones, which all
caches read as they are written. KL in nats per token, float32, of the predictions of these: from the text read again
without the span (with the gap closed), and from the cache that keeps it.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import millpond as mp
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table, write_report

#: Name in the table, and method, budget.
CACHES = {"full": ("full", None), "h2o 50%": ("h2o", "50%")}
#: Draws of the bootstrap over windows, and its seed.
DRAWS, SEED = 10_000, 7


@torch.no_grad()
def predictions(model: Any, cache: Any, text: Tensor, then: Tensor, span: tuple[int, int] | None) -> Tensor:
    """(next, vocabulary) float64 log probabilities of the tokens `then` (1, next) and the one behind, without the last.

    text: (1, n) is read first; span: of it, is forgotten then.
    """
    cache.reset()
    model(text[:, :-1], past_key_values=cache, logits_to_keep=1)
    if span is not None:
        cache.forget(span)
    read = torch.cat([text[:, -1:], then[:, :-1]], 1)
    found: Tensor = model(read, past_key_values=cache).logits[0].double().log_softmax(-1)
    return found


def divergence(of: Tensor, by: Tensor) -> float:
    """KL(of || by) in nats, on average over positions."""
    return float((of.exp() * (of - by)).sum(-1).mean())


def measure(model: Any, windows: list[Tensor], context: int, span: int) -> dict[str, dict[str, list[float]]]:
    """Name of a cache -> name of a comparison -> one number per window."""
    begin = (context - span) // 2
    gone = begin, begin + span
    found: dict[str, dict[str, list[float]]] = {}
    for name, (method, budget) in CACHES.items():
        rows = found[name] = {"again, forgotten": [], "kept, forgotten": [], "again, kept": []}
        with mp.compress(model, method, budget, attach=False) as cache:
            for number, window in enumerate(windows):
                text, then = window[:, :context], window[:, context:]
                rest = torch.cat([text[:, : gone[0]], text[:, gone[1] :]], 1)
                again = predictions(model, cache, rest, then, None)
                kept = predictions(model, cache, text, then, None)
                forgotten = predictions(model, cache, text, then, gone)
                rows["again, forgotten"].append(divergence(again, forgotten))
                rows["kept, forgotten"].append(divergence(kept, forgotten))
                rows["again, kept"].append(divergence(again, kept))
                print(name, number, *(f"{values[-1]:.4f}" for values in rows.values()), flush=True)
    return found


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval by a bootstrap over windows."""
    own = np.array(values)
    draws = np.random.default_rng(SEED).integers(0, len(own), (DRAWS, len(own)))
    low, high = np.percentile(own[draws].mean(1), [2.5, 97.5])
    return float(own.mean()), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--context", type=int, default=768)
    parser.add_argument("--span", type=int, default=256)
    parser.add_argument("--next", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/forget"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", category=UserWarning)
    model, tokenizer = mp.load_model(args.model, "f32"), mp.load_tokenizer(args.model)
    length = args.context + args.next
    characters = args.text.read_text(encoding="utf-8")[: 12 * length * args.windows]
    ids = torch.tensor([tokenizer(characters)["input_ids"]])
    windows = [ids[:, n * length : (n + 1) * length] for n in range(args.windows)]
    if windows[-1].shape[1] < length:
        parser.error(f"the text has {ids.shape[1]} tokens, and {args.windows} windows take {length * args.windows}")
    found = measure(model, windows, args.context, args.span)
    rows = []
    for name, kinds in found.items():
        cells = [f"{mean:.4f} ({low:.4f} to {high:.4f})" for mean, low, high in map(interval, kinds.values())]
        rows.append([f"`{name}`", *cells])
    columns = ["cache", "read again, and forgotten", "kept, and forgotten", "read again, and kept"]
    machine = describe_machine()
    about = {
        "model": args.model,
        "text": args.text.name,
        "windows": args.windows,
        "context": args.context,
        "span": args.span,
        "next": args.next,
        "threads": args.threads,
        "machine": asdict(machine),
        "kl": found,
    }
    said = (
        f"# A span that is forgotten, {args.model}\n\n{args.windows} windows of {args.text.name}: {args.span} of "
        f"{args.context} tokens are forgotten, from the middle. KL of the next {args.next} tokens, nats per token, "
        f"float32; 95 % of a bootstrap over windows.\n\n{markdown_table(columns, rows)}\n"
        f"{machine.hardware}; {machine.software}.\n"
    )
    write_report(args.out.parent, args.out.name, about, said)
    print(said)


if __name__ == "__main__":
    main()
