"""Entries of a layer as neighbouring tokens, and back into the pages of a prompt."""

from __future__ import annotations

import numpy as np
import torch

from millpond.cache.coded.text import LayerEntries
from millpond.cache.layer.layer_cache import LayerCache
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, EntryRows, PaddedEntries


def layer_entries(entries: PaddedEntries, end: int) -> LayerEntries | None:
    """Return entries on the host, as neighbouring tokens up to `end`.

    None: they are other tokens in each head, or have scores or masses.

    Args:
        entries: Entries of a sequence, by position.
        end: Tokens that it has read.
    """
    positions = entries.positions.cpu()
    n, masses = positions.shape[1], entries.log_masses
    if not n or bool((positions != torch.arange(end - n, end, dtype=positions.dtype)).any()):
        return None
    if bool(entries.scores.any()) or (masses is not None and bool(masses.any())):
        return None
    return LayerEntries(end - n, entries.keys.cpu(), entries.values.cpu())


def fill_layer(layer_cache: LayerCache, layer: LayerEntries, shape: AttentionShape, device: torch.device) -> None:
    """Let an empty layer that reads a prompt hold tokens.

    Args:
        layer_cache: The layer.
        layer: The tokens, on the host.
        shape: Settings of its attention.
        device: Device of its pages.

    Raises:
        PoolFullError: no memory is free.
    """
    keys, values = layer.keys.to(device), layer.values.to(device)
    heads, n = keys.shape[:2]
    table = layer_cache.allocate(keys[None, :, :0], values[None, :, :0], shape)
    layer_cache.attention.shape = shape
    lens = np.full(heads, n, dtype=np.int32)
    table.reserve(0, lens)
    start, count = (torch.full((heads,), number, dtype=torch.int32, device=device) for number in (0, n))
    index, positions = (
        torch.arange(first, first + n, dtype=torch.int32, device=device).expand(heads, -1).contiguous()
        for first in (0, layer.first)
    )
    ops.write(table.regions, EntryRows(start, count, index, keys, values, positions))
    table.set_lengths(0, lens)
