"""Changes of many page tables that become visible to kernels together, in one copy to their device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.pages.ref_counted_pool import PageIds
from millpond.cache.pages.region_arrays import Ints
from millpond.kernels.transfers import send


class Numbers(Protocol):
    """Numbers of a page table: those of the host, and the copies that kernels read."""

    @property
    def device(self) -> torch.device:
        """Device of the copies."""
        ...

    @property
    def page_ids(self) -> PageIds:
        """Page ids, (R, n), on the host."""
        ...

    @property
    def region_numbers(self) -> tuple[Ints, Ints, Ints, npt.NDArray[np.int64]]:
        """Lengths, capacities, protected newest positions and rules of all regions.

        Each is (R,) on the host.
        """
        ...

    def adopt(self, pages: Tensor, lens: Tensor, capacities: Tensor, recent: Tensor, head_rules: Tensor) -> None:
        """Let kernels read these copies of the host's numbers, which they may write to."""
        ...


#: Tables whose changes become visible later, by identity; None outside of `publish_together`.
_LATER: ContextVar[dict[int, Numbers] | None] = ContextVar("_LATER", default=None)


@contextmanager
def publish_together() -> Iterator[None]:
    """Make what changes of any tables inside visible to kernels at the end.

    It goes to their device in one copy. Until then kernels see the numbers from before, and a new table has none.
    """
    mark = _LATER.set({})
    try:
        yield
    finally:
        tables = list((_LATER.get() or {}).values())
        _LATER.reset(mark)
        for device in {table.device for table in tables}:
            publish_all([table for table in tables if table.device == device])


def defer(table: Numbers) -> bool:
    """Return whether what has changed of a table becomes visible later; note the table."""
    later = _LATER.get()
    if later is not None:
        later[id(table)] = table
    return later is not None


def publish_all(tables: Sequence[Numbers]) -> None:
    """Make the numbers of tables of one device visible to kernels, in one copy of each type."""
    lists = [(table.page_ids, *table.region_numbers) for table in tables]
    small = send([part for numbers in lists for part in numbers[:-1]], tables[0].device)
    large = send([numbers[-1] for numbers in lists], tables[0].device)
    by_kind = (small[kind::4] for kind in range(4))
    for table, pages, lens, capacities, recent, rules in zip(tables, *by_kind, large, strict=True):
        table.adopt(pages, lens, capacities, recent, rules)
