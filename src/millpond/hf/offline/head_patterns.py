"""Head patterns for MInference, searched once per model and kept in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import OptionError
from millpond.hf.compress import compress
from millpond.kernels.args import AttentionShape
from millpond.methods.minference import make_pattern
from millpond.models.cache_argument import cache_argument
from millpond.policy.needs import BLOCK, HeadPrompt, Pattern

#: What the search chooses from: kind and two numbers. A query reads some 800 entries with each.
CANDIDATES = (
    ("a_shape", 100, 800),
    ("vertical_slash", 30, 800),
    ("vertical_slash", 100, 750),
    ("vertical_slash", 500, 700),
    ("vertical_slash", 3500, 100),
    ("block_sparse", 14, 1),
)


def find_patterns(
    model: PreTrainedModel,
    ids: Tensor,
    path: str | Path,
    *,
    candidates: Sequence[tuple[str, int, int]] = CANDIDATES,
    after: int = 2500,
) -> None:
    """Find for each head the pattern that keeps most attention, for `compress(model, "minference", patterns=path)`.

    The attention of the queries behind position `after` that falls on what they would read is averaged for every
    candidate; the first of the best is written, with that number. Layers with a sliding window are left out.

    Args:
        ids: (1, n) of a long text without pads. path: a JSON file.

    Raises:
        OptionError: the text ends before `after`, there is more than one, or a candidate is no pattern.
    """
    if ids.shape[0] != 1 or ids.shape[1] <= after:
        raise OptionError(f"ids of shape {tuple(ids.shape)}: give one text of more than after={after} tokens")
    patterns = [make_pattern(*candidate) for candidate in candidates]
    layers: dict[int, dict[str, tuple[str, int, int, float]]] = {}

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
        group = q.shape[1] // k.shape[1]
        layers[layer] = {}
        for head in range(0 if shape.window else q.shape[1]):
            sink = None if shape.sink_logits is None else shape.sink_logits[head]
            prompt = HeadPrompt(q[0, head], k[0, head // group], shape.scale, shape.softcap, sink)
            kept = [share_kept(prompt, pattern, after) for pattern in patterns]
            best = kept.index(max(kept))
            layers[layer][str(head)] = (*candidates[best], kept[best])

    with torch.no_grad(), compress(model, "full") as cache:
        cache.watch(observe)
        model(ids, **cache_argument(cache), logits_to_keep=1)
    Path(path).write_text(json.dumps([layers[layer] for layer in sorted(layers)]), encoding="utf-8")


def share_kept(prompt: HeadPrompt, pattern: Pattern, after: int) -> float:
    """The mean over the queries from position `after` on: the attention that falls on what they read."""
    look, n, total = pattern.look(prompt), len(prompt.k), 0.0
    for begin in range(prompt.first, n, BLOCK):
        end = min(begin + BLOCK, n)
        if end <= after:
            continue
        part = prompt._replace(q=prompt.q[: end - prompt.first], k=prompt.k[:end])
        p, columns = part.last_rows(end - begin), look(begin, end)
        seen = torch.zeros_like(p).bool()
        seen[:, columns] = True
        if pattern.near is not None:
            first, width = pattern.near
            row = torch.arange(begin, end, device=p.device)[:, None]
            column = torch.arange(end, device=p.device)
            seen &= (column < first) | (row - column < width)
        total += float(p.masked_fill(~seen, 0)[max(after - begin, 0) :].sum())
    return total / (n - max(after, prompt.first))
