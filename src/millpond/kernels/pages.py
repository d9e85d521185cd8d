"""Memory of a page pool for the kernels: arenas of pages, for any content, and a table of their addresses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

T = TypeVar("T")

#: Arenas whose addresses there is room for on a device.
_MIN_ROOM = 1024


class Arenas(ABC):
    """Arenas of equal size, but for one that may be shorter, and for those that are empty.

    Page `i` is row `i % pages_per_arena` of arena `i // pages_per_arena` of each array. The first arena is of full size
    where there are others.

    Attributes:
        pages_per_arena: Pages of an arena, a power of two.
        slots: Slots (tokens) per page, a power of two.
        masses: Whether slots carry a mass.
        positions: Per arena (pages_per_arena, slots) int32, the position of the entry in its own unpadded text.
        scores: Per arena (pages_per_arena, slots) float32, the accumulator of the policy.
        log_masses: Per arena (pages_per_arena, slots) float32, only with `masses`: the log of how many entries a slot
            stands for, which attention adds to its logit. 0 for one entry as it came.
        bases: (5, n) int64, addresses of the one or two arrays of `contents`, of positions, scores and log masses, on
            the pool's device; 0 for an array that does not exist. On a CPU n is `n_arenas`; elsewhere there is room for
            more, so that recorded steps keep the same tensor when a pool grows.
    """

    pages_per_arena: int
    slots: int
    device: torch.device
    masses: bool
    positions: list[Tensor]
    scores: list[Tensor]
    log_masses: list[Tensor]
    bases: Tensor
    _is_changing: bool = False
    _derived: dict[Hashable, Any] | None = None

    @property
    @abstractmethod
    def contents(self) -> list[list[Tensor]]:
        """Arenas of the arrays that hold keys and values, at most two."""

    @abstractmethod
    def _add_contents(self, n_pages: int) -> None:
        """Allocate the arrays of keys and values of one more arena."""

    @property
    def arrays(self) -> list[list[Tensor]]:
        """Arenas of every array, in the order of `bases`."""
        return [*self.contents, self.positions, self.scores, *([self.log_masses] if self.masses else [])]

    @property
    def n_arenas(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, summed from the buffers themselves."""
        return self.derived(
            "nbytes",
            lambda: sum(t.numel() * t.element_size() for arrays_of_part in self.arrays for t in arrays_of_part),
        )

    def derived(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` makes of the arenas, cached until they change."""
        cached_values = self._derived
        if cached_values is None:
            cached_values = self._derived = {}
        if name not in cached_values:
            cached_values[name] = make()
        cached: T = cached_values[name]
        return cached

    def add_arena(self, n_pages: int | None = None) -> None:
        """Allocate one more arena, of `n_pages` pages if it is the last one.

        Live pages do not move.
        """
        n, p, dev = n_pages or self.pages_per_arena, self.slots, self.device
        self._add_contents(n)
        self.positions.append(torch.empty(n, p, dtype=torch.int32, device=dev))
        self.scores.append(torch.empty(n, p, dtype=torch.float32, device=dev))
        if self.masses:
            self.log_masses.append(torch.empty(n, p, dtype=torch.float32, device=dev))
        self.refresh()

    def drop_last_arena(self) -> None:
        """Release the memory of the last arena, which may hold no live page."""
        for arenas in self.arrays:
            arenas.pop()
        self.refresh()

    def resize_arena(self, number: int, n_pages: int) -> None:
        """Keep the first `n_pages` pages of an arena, at another address; 0 releases its memory."""
        for arenas in self.arrays:
            before = arenas[number]
            n_kept = min(len(before), n_pages)
            arenas[number] = before.new_empty(n_pages, *before.shape[1:])
            arenas[number][:n_kept] = before[:n_kept]
        self.refresh()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Write the addresses once at the end of a block that changes arenas.

        Any number of them may be added, resized or dropped inside.
        """
        self._is_changing = True
        try:
            yield
        finally:
            self._is_changing = False
            self.refresh()

    def refresh(self) -> None:
        """Write the addresses of the arenas again."""
        self._derived = None
        if not self._is_changing:
            self._write_bases()

    def _write_bases(self) -> None:
        contents = [*self.contents, [], []][:2]
        columns = [*contents, self.positions, self.scores, self.log_masses]
        rows = [[t.data_ptr() for t in arenas] or [0] * self.n_arenas for arenas in columns]
        bases = torch.tensor(rows, dtype=torch.int64).view(len(rows), self.n_arenas)
        if self.device.type == "cpu":
            self.bases = bases
            return
        if self.bases.device.type == "cpu" or self.bases.shape[1] < self.n_arenas:
            capacity = max(_MIN_ROOM, 1 << max(self.n_arenas - 1, 0).bit_length())
            self.bases = torch.zeros(len(rows), capacity, dtype=torch.int64, device=self.device)
        self.bases[:, : self.n_arenas].copy_(bases)

    def copy_pages(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        """Copy whole pages, source[i] to target[i] (page ids (n,)), for copy-on-write.

        All are read before one is written. Arenas without such a page cost nothing, and nothing waits for the device.
        """
        reads, writes = self._by_arena(source), self._by_arena(target)
        for arenas in self.arrays:
            copied = arenas[0].new_empty(len(source), *arenas[0].shape[1:])
            for arena, rows, which in reads:
                copied.index_copy_(0, which, arenas[arena][rows])
            for arena, rows, which in writes:
                arenas[arena].index_copy_(0, rows, copied[which])

    def _by_arena(self, ids: npt.NDArray[np.int32]) -> list[tuple[int, Tensor, Tensor]]:
        """Return each arena with some of the pages `ids`, their rows in it, and their indices.

        The indices are those in `ids`.
        """
        order = np.argsort(ids, kind="stable")
        arenas, begins = np.unique(ids[order] // self.pages_per_arena, return_index=True)
        rows, which = (
            torch.from_numpy(x.astype(np.int64)).to(self.device) for x in (ids % self.pages_per_arena, order)
        )
        pieces = which.tensor_split(begins[1:].tolist())
        return [(int(arena), rows[piece], piece) for arena, piece in zip(arenas, pieces, strict=True)]


@dataclass(slots=True)
class PageArrays(Arenas):
    """Arenas of natural rows: a slot is a row of `key_dim` (or `value_dim`) numbers.

    Attributes:
        key_dim: Numbers per key.
        value_dim: Numbers per value.
        dtype: Dtype of keys and values.
        keys: Per arena (pages_per_arena, slots, key_dim), in the storage dtype.
        values: Per arena (pages_per_arena, slots, value_dim), in the storage dtype.
    """

    pages_per_arena: int
    slots: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    masses: bool = False
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    log_masses: list[Tensor] = field(default_factory=list)
    bases: Tensor = field(default_factory=lambda: torch.zeros(5, 0, dtype=torch.int64))

    @property
    def contents(self) -> list[list[Tensor]]:
        return [self.keys, self.values]

    def _add_contents(self, n_pages: int) -> None:
        for arenas, dim in ((self.keys, self.key_dim), (self.values, self.value_dim)):
            arenas.append(torch.empty(n_pages, self.slots, dim, dtype=self.dtype, device=self.device))
