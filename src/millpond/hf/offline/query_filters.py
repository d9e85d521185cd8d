"""Query filters for Q-Filters, computed once per model and kept in a file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from millpond.hf.cache import MillpondCache
from millpond.methods.qfilters import query_directions


def save_filters(cache: MillpondCache, path: str | Path) -> None:
    """Write the filters of all prompts of a cache's batch, for `compress(model, "qfilters", filters=path)`.

    Args:
        cache: of the method qfilters, after its prompts.
        path: a .safetensors file, of float32 numbers (layers, KV heads, head size).

    Raises:
        CacheMismatchError: the cache has seen no prompt, or its method finds no filters.
    """
    found = []
    for core in cache.layer_caches:
        total = core.moments(0)
        for sequence in range(1, cache.timeline.n_seq):
            total = total + core.moments(sequence)
        found.append(query_directions(total, core.stored.shape[1]).float().cpu())
    save_file({"q_filters": torch.stack(found)}, path)
