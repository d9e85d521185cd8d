"""Unquantized entries of one sequence, rewritten into fresh pages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.types import Entries
from millpond.kernels import ops
from millpond.kernels.args import EntryRows


def write_fresh_pages(table: PageTable, sequence: int, found: Entries, index: Tensor, counts: Tensor) -> None:
    """Hold the first counts (H,) candidates that index (H, n) names, and nothing else, in fresh neighbouring pages.

    Raises:
        PoolFullError: the pool is full; nothing was changed.
    """
    lens = counts.cpu().numpy().astype(np.int32)
    rows = table.rows(sequence)
    table.renew(sequence, lens)
    start = torch.zeros_like(counts).int()
    ops.write(table.regions_of(rows), EntryRows(start, counts.int(), index.int().contiguous(), *found[:5]))
    table.set_lengths(sequence, lens)
