"""Pools of pages, of unquantized numbers and of codes; see `RefCountedPool`."""

from __future__ import annotations

import torch

from millpond.cache.pages.page_slots import DEFAULT_SLOTS, check_slots
from millpond.cache.pages.ref_counted_pool import Limit, PageIds, RefCountedPool, arena_bytes_on, pages_per_arena
from millpond.kernels.packed.layout import PackedArrays, PackedLayout
from millpond.kernels.pages import PageArrays

__all__ = ["DEFAULT_SLOTS", "PageIds", "PagePool", "check_slots"]


class PagePool(RefCountedPool[PageArrays]):
    """Fixed-size pages of `slots` entries of one KV head.

    Args:
        key_dim: Numbers per key.
        value_dim: Numbers per value.
        dtype: Stored type of the numbers.
        device: Device of the pages.
        slots: Entries per page, a power of two.
        limit_bytes: Most bytes that the pool may ever hold, side arrays included; None for no limit.
        masses: Whether entries carry a mass, as merging policies need it: 4 bytes more per slot.
        memory_limit: Limit of several pools together, in place of `limit_bytes`.
        until_plan: Whether entries of a prompt are here until its plan moves the kept ones into another pool.

    Raises:
        OptionError: `slots` is no power of two, or `limit_bytes` is smaller than one page.
    """

    def __init__(
        self,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        slots: int = DEFAULT_SLOTS,
        limit_bytes: int | None = None,
        masses: bool = False,
        memory_limit: Limit | None = None,
        until_plan: bool = False,
    ) -> None:
        check_slots(slots)
        kv_bytes = slots * (key_dim + value_dim) * torch.empty(0, dtype=dtype).element_size()
        page_bytes = kv_bytes + slots * side_bytes(masses)
        n_pages = pages_per_arena(page_bytes, arena_bytes_on(torch.device(device), memory_limit))
        arrays = PageArrays(n_pages, slots, key_dim, value_dim, dtype, torch.device(device), masses)
        super().__init__(arrays, kv_bytes, page_bytes, limit_bytes, memory_limit)
        self.until_plan = until_plan


def side_bytes(masses: bool) -> int:
    """Return the bytes of a slot in addition to key and value.

    Position int32, score float32 and, if any, log mass float32.
    """
    return 12 if masses else 8


class QuantizedPool(RefCountedPool[PackedArrays]):
    """Pages of entries as codes, in a layout.

    Args:
        layout: Layout of a page.
        device: Device of the pages.
        limit_bytes: Most bytes that the pool may ever hold, side arrays included; None for no limit.
        masses: Whether entries carry a mass, as in the plain pages of the same layer.
        memory_limit: Limit of several pools together, in place of `limit_bytes`.

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
        memory_limit: Limit | None = None,
    ) -> None:
        page_bytes = layout.page_bytes + layout.slots * side_bytes(masses)
        per_arena = pages_per_arena(page_bytes, arena_bytes_on(torch.device(device), memory_limit))
        arrays = PackedArrays(per_arena, layout, torch.device(device), masses)
        super().__init__(arrays, layout.page_bytes, page_bytes, limit_bytes, memory_limit)
