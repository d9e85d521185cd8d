"""Page tables whose numbers on the device are copies, as on a GPU, while all that computes is the CPU.

The device is done at once; what is asked of it is counted, for a GPU's host would wait there.
"""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_regions import QuantizedRegions
from millpond.cache.pages.region_arrays import RegionLengths

UPLOADS = ("region_arrays", "quantized_regions", "page_table")
ASKS = ("page_table", "quantized_store")


def set_apart(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Let tables keep the device's numbers in memory of its own from now on.

    Returns:
        Counts of reads that wait for the newest work, of lengths and of tombstones, and of looks that arrived.
    """
    for name in UPLOADS:
        patch.setattr(importlib.import_module(f"millpond.cache.pages.{name}"), "on_device", _copied)
    for name in ASKS:
        patch.setattr(importlib.import_module(f"millpond.cache.pages.{name}"), "shares_memory", lambda device: False)
    counts: Counter[str] = Counter()
    real_take, real_arrive = RegionLengths._take, RegionLengths.arrive
    real_dead: Any = vars(QuantizedRegions)["n_evicted"]

    def take(self: RegionLengths, lens: Tensor) -> None:
        counts["lengths"] += 1
        real_take(self, lens)

    def arrive(self: RegionLengths) -> bool:
        arrived = real_arrive(self)
        counts["looks"] += arrived
        return arrived

    def dead(self: QuantizedRegions) -> Any:
        counts["tombstones"] += self.is_behind
        return real_dead.fget(self)

    patch.setattr(RegionLengths, "_take", take)
    patch.setattr(RegionLengths, "arrive", arrive)
    patch.setattr(QuantizedRegions, "n_evicted", property(dead))
    return counts


def _copied(source: np.ndarray | Tensor, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(source) if isinstance(source, np.ndarray) else source
    return tensor.to(device, copy=True)


def check_pages(table: PageTable, n: int = 0, *, falls: bool = False) -> None:
    """Compare what the host knows of a table with what the device holds, without asking it for anything.

    Args:
        table: Table whose steps are on a device.
        n: Entries that each region must have room for besides.
        falls: Whether lengths may have fallen, for whose pages nobody has looked yet.
    """
    there, slots = table.lens.numpy(), table.pool.slots
    most, owned = table._lengths.most, table.page_lists.owned
    assert (most >= there).all()
    assert (owned * slots >= there + n).all()
    assert falls or (owned <= there // slots + 1 + (most > there)).all()
    for part in table.packed_parts:
        assert (part._dead <= part.regions().dead.numpy()).all()
