"""Null blocks of each running request, counted on the host: lengths there are shortened without asking the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from millpond_vllm.messages import Eviction

#: Returns the requests of a step's rows in their order; None if they are not known.
RowRequests = Callable[[Any], Sequence[str | None] | None]


class NullBlocks:
    """Counts of null blocks; they change with the scheduler's orders alone.

    Args:
        block: Tokens of a block of the manager.
        row_requests: Returns the requests of a step's rows.
    """

    def __init__(self, block: int, row_requests: RowRequests) -> None:
        self._block = block
        self._row_requests = row_requests
        self._counts: dict[str, int] = {}

    def take(self, evictions: Sequence[Eviction]) -> None:
        """Take the rows of requests that evict before this step."""
        for one in evictions:
            self._counts[one.request] = one.row.count(0)

    def forget(self, requests: set[str]) -> None:
        """Drop the counts of requests that ended or were preempted."""
        for request in requests:
            self._counts.pop(request, None)

    def shortened(self, lengths: Tensor | None, step: Any) -> Tensor | None:
        """Return lengths (S,) on the host without null blocks, as kernels that plan on the host read them.

        None if no lengths are given, or if the requests of the rows are not known: such a kernel then asks the device.

        Args:
            lengths: (S,) tokens of each row; rows behind the last request fill up a recorded graph.
            step: Metadata of the step, before a backend builds its own.
        """
        if lengths is None or not self._counts:
            return lengths
        requests = self._row_requests(step)
        if requests is None:
            return None
        null = torch.zeros(len(lengths), dtype=lengths.dtype)
        counts = [self._counts.get(request, 0) if request is not None else 0 for request in requests[: len(lengths)]]
        null[: len(counts)] = torch.tensor(counts, dtype=lengths.dtype)
        return torch.minimum(lengths, (lengths - null * self._block).clamp(min=1))
