"""A pool of pages of codes; see `RefCountedPool`."""

from __future__ import annotations

import torch

from millpond.cache.pages.pool import side_bytes
from millpond.cache.pages.ref_counted_pool import Limit, RefCountedPool, arena_bytes_on, pages_per_arena
from millpond.kernels.packed.layout import PackedArrays, PackedLayout


class QuantizedPool(RefCountedPool[PackedArrays]):
    """Pages of `layout`.

    Args:
        limit_bytes: most bytes that the pool may ever hold, side arrays included; None for no limit.
        masses: whether entries carry a mass, as in the plain pages of the same layer.
        account: the limit of several pools together, in place of `limit_bytes`.

    Raises:
        OptionError: `limit_bytes` is smaller than one page.
    """

    def __init__(
        self,
        layout: PackedLayout,
        device: torch.device | str = "cpu",
        *,
        limit_bytes: int | None = None,
        masses: bool = False,
        account: Limit | None = None,
    ) -> None:
        page_bytes = layout.page_bytes + layout.slots * side_bytes(masses)
        per_arena = pages_per_arena(page_bytes, arena_bytes_on(torch.device(device), account))
        arrays = PackedArrays(per_arena, layout, torch.device(device), masses)
        super().__init__(arrays, layout.page_bytes, page_bytes, limit_bytes, account)
