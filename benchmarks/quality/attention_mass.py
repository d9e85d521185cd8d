"""Attention of a real model with the full cache: the sink, heavy columns, sparsity, and what the next tokens look at.

    attention_mass.py --model smollm2-135m --windows 4 --length 2048 --out RESULTS.json TEXT...

Each window is read by itself, without a token before it, in float32. One layer's weights are held at a time. All
numbers are kept per text, layer and head, as means over the windows; attention_page.py makes tables and a picture.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from millpond.models.load import load_tokenizer, resolve
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.train.text.data import read_document
from millpond_lab.train.text.eval import even_columns, gathered, sparsity, spread_windows

T = TypeVar("T")

SINK, NEXT, BUDGET, SEED = 4, 64, 0.2, 7
SHARES = (0.05, 0.20)
#: One query in N is looked at where its own entries are sorted.
EVERY = 16
RANKS = 64


def layer_statistics(weights: Tensor, group: int) -> dict[str, Tensor]:
    """Statistics of one layer's weights (H, L, L), causal, each (H, ...), or (H / group, ...) for those of `held`."""
    columns = weights.sum(1)
    later, even = weights[:, SINK:], even_columns(columns.shape[-1]).to(columns)
    own = torch.stack([torch.stack(own_heaviest(row)) for row in weights[:, weights.shape[1] // 2 :: EVERY].unbind(1)])
    return {
        "sink": later[:, :, :SINK].sum(-1).mean(-1),
        "first": weights[:, 1:, 0].mean(-1),
        "curve": gathered(columns),
        "beyond": gathered(columns[:, SINK:]),
        "own": own.mean(0).T,
        "sparsity": sparsity(weights),
        "sparsity_beyond": sparsity(later[:, :, SINK:]),
        "ranked": at_ranks(columns / columns.shape[-1]),
        "ranked_by_age": at_ranks(columns / even),
        **held(weights.unflatten(0, (-1, group)).mean(1)),
    }


def own_heaviest(row: Tensor) -> list[Tensor]:
    """(H,) for each of `SHARES`: what a query gives to the heaviest of the entries that it sees, itself included."""
    seen = int((row > 0).any(0).nonzero().max()) + 1
    ordered = row[:, :seen].sort(-1, descending=True).values
    return [ordered[:, : max(1, round(share * seen))].sum(-1) for share in SHARES]


def at_ranks(columns: Tensor) -> Tensor:
    """(H, RANKS): columns (H, L) from the heaviest to the lightest, at ranks 1 to L that are even on a log scale."""
    return columns.sort(-1, descending=True).values[:, ranks(columns.shape[-1]) - 1]


def ranks(length: int) -> Tensor:
    return torch.logspace(0, np.log10(length), RANKS).round().long().clamp(1, length)


def held(weights: Tensor) -> dict[str, Tensor]:
    """The share of the attention of the last `NEXT` queries that falls on what a rule keeps of the entries before them.

    A rule keeps `BUDGET` of them by the attention of the queries before (weights (H, L, L)); each (H, len(CHOICES)).
    `held` is the share of what they give to the entries before them, `held_beyond` that without the first `SINK`.
    """
    context = weights.shape[-1] - NEXT
    before, after = weights[:, :context, :context].sum(1), weights[:, context:, :context].sum(1)
    kept = torch.stack([*choices(before, after).values()], 1)  # (H, rules, T)
    after = after[:, None]
    beyond = after[..., SINK:]
    return {
        "held": (after * kept).sum(-1) / after.sum(-1),
        "held_beyond": (beyond * kept[..., SINK:]).sum(-1) / beyond.sum(-1),
    }


#: The rules of `choices`, in its order.
CHOICES = ("best", "h2o", "heavy only", "h2o, first four out", "streaming", "window", "random")


def choices(before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Masks (H, T) of equally many entries, by the attention (H, T) that they had before and that they get after."""
    length = before.shape[-1]
    budget, place = round(BUDGET * length), torch.arange(length)
    sinks, half = place < SINK, place >= length - budget // 2

    def fill(scores: Tensor, kept: Tensor, never: Tensor | None = None) -> Tensor:
        masked = scores.masked_fill(kept, float("inf"))
        masked = masked if never is None else masked.masked_fill(never, -1.0)
        return torch.zeros_like(scores).scatter_(-1, masked.topk(budget).indices, 1.0)

    nothing, newest = torch.zeros_like(sinks), place.to(before).expand_as(before)
    found = (
        fill(after, nothing),
        fill(before, sinks | half),
        fill(before, nothing),
        fill(before, half, sinks),
        fill(newest, sinks),
        fill(newest, nothing),
        fill(torch.rand(before.shape, generator=torch.Generator().manual_seed(SEED)), nothing),
    )
    return dict(zip(CHOICES, found, strict=True))


def by_layer(model: Any, ids: Tensor, look: Callable[[Tensor], T]) -> list[T]:
    """What `look` finds in each layer's weights (H, L, L) of a window (1, L); they are let go before the next ones."""
    found: list[T] = []

    def shown(_: nn.Module, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        found.append(look(output[1][0]))
        return output[0], None

    hooks = [layer.self_attn.register_forward_hook(shown) for layer in model.model.layers]
    try:
        model(ids, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.inference_mode()
def measure(model: Any, windows: list[Tensor]) -> dict[str, Any]:
    """Means over windows (1, L), each (n_layers, n_heads, ...), and statistics by word."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    sums: list[dict[str, Tensor]] = []
    size = model.config.vocab_size
    words, counts = torch.zeros(model.config.num_hidden_layers, size), torch.zeros(size)
    for n, ids in enumerate(windows):
        layers = by_layer(model, ids, lambda weights: (layer_statistics(weights, group), weights.sum((0, 1))))
        found, columns = [statistics for statistics, _ in layers], [column for _, column in layers]
        sums = found if not n else [{k: a[k] + b[k] for k in a} for a, b in zip(sums, found, strict=True)]
        # the first tokens are a sink whatever word they are
        words.index_add_(1, ids[0, SINK:], torch.stack(columns)[:, SINK:])
        counts += ids[0, SINK:].bincount(minlength=size)
        print(f"window {n + 1} of {len(windows)}", flush=True)
    mean = {name: torch.stack([layer[name] for layer in sums]).double() / len(windows) for name in sums[0]}
    return {name: rounded(value) for name, value in mean.items()} | {"words": by_word(words, counts)}


def by_word(words: Tensor, counts: Tensor) -> dict[str, Any]:
    """The attention (n_layers, vocabulary) that words gathered, and how often they occur (vocabulary,).

    Slopes are of log(value) over log(rank), at ranks even on a log scale; correlations are Spearman's, over words.
    """
    there = counts > 0
    gathered_by, often = words[:, there], counts[there]
    each = gathered_by / often
    return {
        "different": int(there.sum()),
        "tokens": int(counts.sum()),
        "slope": rounded(slope(at_ranks(gathered_by), len(often))),
        "slope_of_counts": round(float(slope(at_ranks(often[None]), len(often))), 4),
        "with_counts": [round(spearman(layer, often), 4) for layer in gathered_by],
        "each_with_counts": [round(spearman(layer, often), 4) for layer in each],
    }


def slope(ranked: Tensor, length: int) -> Tensor:
    """(...): of log(value) over log(rank), values (..., RANKS) of `at_ranks` of that many columns, by least squares."""
    x = ranks(length).double().log()
    x, y = x - x.mean(), ranked.double().log()
    return (y * x).sum(-1) / (x * x).sum()


def spearman(a: Tensor, b: Tensor) -> float:
    """Correlation of ranks, equal values sharing the mean of theirs."""
    return float(np.corrcoef(_rank(a), _rank(b))[0, 1])


def _rank(values: Tensor) -> np.ndarray:
    _, place, count = np.unique(values.numpy(), return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[place]


def rounded(value: Tensor) -> Any:
    """Four figures, which is more than the windows say."""
    return json.loads(json.dumps(value.tolist()), parse_float=lambda number: float(f"{float(number):.4g}"))


def eager_model(name: str) -> Any:
    """A model in float32 whose attention weights can be seen."""
    family: Any = AutoModelForCausalLM
    return family.from_pretrained(resolve(name, "f32"), dtype=torch.float32, attn_implementation="eager").eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=4, help="per text, spread evenly over it")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = eager_model(args.model), load_tokenizer(args.model)
    found = {}
    for text in args.texts:
        ids = tokenizer(read_document(text), add_special_tokens=False, verbose=False).input_ids
        found[text.name] = measure(model, spread_windows(ids, None, args.length, args.windows))
    even, machine = gathered(even_columns(args.length)[None])[0], describe_machine()
    digest = hashlib.sha256((Path(resolve(args.model, "f32")) / "model.safetensors").read_bytes())
    result = {
        "model": args.model,
        "weights_sha256": digest.hexdigest(),
        "windows": args.windows,
        "length": args.length,
        "choices": CHOICES,
        "ranks": ranks(args.length).tolist(),
        "even": rounded(even),
        "hardware": machine.hardware,
        "software": machine.software,
        "texts": found,
    }
    args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
