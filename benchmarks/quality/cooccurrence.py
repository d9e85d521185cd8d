"""Whether heavy hitters are words that stand beside many others, and whether a query looks at them: H2O's observation.

    cooccurrence.py --model smollm2-135m --windows 4 --length 1024 --out RESULTS.json TEXT...

The degree of a word is how many different words stand within `BESIDE` tokens of it, anywhere in the text. Per window
and layer: Spearman's correlation over the window's words of the degree with the attention that a word gathered, and
with what it gathered per place; and, over the second half of the queries and all heads, how often the entry that a
query attends to most is among the 5 % that have gathered most until then, with the first four tokens and without.
Intervals are of the bootstrap over windows. Each window is read by itself with the full cache, in float32.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention_mass import SINK, by_layer, eager_model, spearman
from torch import Tensor

from millpond.models.load import load_tokenizer
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.evals.harness.summary import resampled_interval
from millpond_lab.train.text.data import read_document
from millpond_lab.train.text.eval import spread_windows

BESIDE, HEAVY, SEED = 5, 0.05, 7
#: One query in N is looked at where its largest entry is.
EVERY = 16
#: What is kept of each window and layer.
NAMES = ("gathered", "per_place", "argmax", "argmax_beyond")


def degrees(ids: Tensor, size: int) -> Tensor:
    """(size,): how many different words stand within `BESIDE` tokens of each word of a text (L,)."""
    pairs = [torch.stack((ids[:-step], ids[step:])) for step in range(1, BESIDE + 1)]
    both = torch.cat([torch.cat((one, one.flip(0)), 1) for one in pairs], 1)
    return (both[0] * size + both[1]).unique().div(size, rounding_mode="floor").bincount(minlength=size)


def by_word(columns: Tensor, ids: Tensor, degree: Tensor) -> tuple[float, float]:
    """Correlation of the degree (size,) with the attention (L,) of a window's words (L,): the sum, and per place."""
    words, inverse, counts = ids[SINK:].unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(words)).index_add_(0, inverse, columns[SINK:])
    own = degree[words].float()
    return spearman(sums, own), spearman(sums / counts, own)


def argmax_is_heavy(weights: Tensor, first: int) -> float:
    """Share of queries in the second half of weights (H, L, L) whose largest entry is heavy, from entry `first` on.

    Heavy are the 5 % of the entries before the query that have gathered most from the queries before it.
    """
    length = weights.shape[-1]
    gathered = weights.cumsum(1)
    found = []
    for query in range(length // 2, length, EVERY):
        before = gathered[:, query - 1, first:query]
        heavy = before.topk(max(1, round(HEAVY * before.shape[-1])), -1).indices
        most = weights[:, query, first:query].argmax(-1, keepdim=True)
        found.append((heavy == most).any(-1).float().mean())
    return float(torch.stack(found).mean())


def of_layer(weights: Tensor, ids: Tensor, degree: Tensor) -> list[float]:
    """`NAMES` of one layer's weights (H, L, L)."""
    words = by_word(weights.sum((0, 1)), ids, degree)
    return [*words, argmax_is_heavy(weights, 0), argmax_is_heavy(weights, SINK)]


@torch.inference_mode()
def measure(model: Any, windows: list[Tensor], degree: Tensor) -> Tensor:
    """(windows, layers, `NAMES`) of windows (1, L)."""
    each = []
    for n, ids in enumerate(windows):
        each.append(by_layer(model, ids, partial(of_layer, ids=ids[0], degree=degree)))
        print(f"window {n + 1} of {len(windows)}", flush=True)
    return torch.tensor(each)


def summary(values: Tensor) -> dict[str, Any]:
    """Of each name the mean over layers with its interval over windows, and the mean of each layer."""
    found = {}
    for place, name in enumerate(NAMES):
        own = values[..., place].double()
        drawn = resampled_interval(own.mean(1).numpy(), np.ones(len(own)), SEED)
        found[name] = {
            "mean": round(drawn.mean, 4),
            "interval": [round(drawn.low, 4), round(drawn.high, 4)],
            "layers": [round(float(one), 4) for one in own.mean(0)],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--name", help="of the model in the results; its own by default")
    parser.add_argument("--windows", type=int, default=4, help="per text, spread evenly over it")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="results of several models are added to it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = eager_model(args.model), load_tokenizer(args.model)
    values = []
    for text in args.texts:
        ids = tokenizer(read_document(text), add_special_tokens=False, verbose=False).input_ids
        degree = degrees(torch.tensor(ids), model.config.vocab_size)
        values.append(measure(model, spread_windows(ids, None, args.length, args.windows), degree))
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"models": {}}
    report["models"][args.name or args.model] = {
        "texts": [text.name for text in args.texts],
        "windows": args.windows,
        "length": args.length,
        "hardware": describe_machine().hardware,
        **summary(torch.cat(values)),
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
