"""The plain part of one sequence, written anew."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.types import Entries
from millpond.kernels import ops


def write_fresh_pages(table: PageTable, sequence: int, found: Entries, index: Tensor, counts: Tensor) -> None:
    """Hold the first counts (H,) candidates that index (H, n) names, and nothing else, in fresh neighbouring pages.

    Raises:
        PoolFullError: the pool is full; nothing was changed.
    """
    lens = counts.cpu().numpy().astype(np.int32)
    rows = table.rows(sequence)
    table.renew(sequence, lens)
    ops.write(
        table.pool.arrays, table.pages[rows], torch.zeros_like(counts).int(), counts.int(), index.int().contiguous(),
        found.keys, found.values, found.positions, found.scores, found.log_masses,
    )  # fmt: skip
    table.set_lengths(sequence, lens)
