"""Figures of the runs of pages of one layer on a disk, in columns, so that many runs are looked up at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
#: Rows by which the table grows, beyond an eighth of those that there are.
_SPARE = 16


class RunTable:
    """Runs of pages of one sequence each, which were written together, array after array.

    The number of a run that is gone becomes that of a later one.

    Attributes:
        columns: (7, n) int64, of which the others are rows. offset, nbytes: in the file, multiples of `ALIGNMENT`.
        needed: bytes of the pages. n_pages: how many were written. generation: what the checksum begins with, so that
            pages of an earlier run at the same place are not taken for these. checksum: CRC-32 of the pages.
            live: pages that are still held; 0 of a number that no run has.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._set(np.zeros((7, 0), dtype=np.int64))

    def _set(self, columns: Numbers) -> None:
        self.columns: Numbers = columns
        rows: list[Numbers] = [*columns]
        self.offset, self.nbytes, self.needed, self.n_pages, self.generation, self.checksum, self.live = rows

    @property
    def numbers(self) -> Numbers:
        """Numbers of all runs."""
        return np.flatnonzero(self.live)

    def add(self, offset: int, nbytes: int, needed: int, n_pages: int, generation: int) -> int:
        """The number of one more run, whose checksum is not known yet."""
        if not self._free:
            n = self.columns.shape[1]
            more = n // 8 + _SPARE
            self._set(np.concatenate([self.columns, np.zeros((7, more), dtype=np.int64)], axis=1))
            self._free = [*range(n + more - 1, n - 1, -1)]
        number = self._free.pop()
        self.columns[:, number] = offset, nbytes, needed, n_pages, generation, 0, n_pages
        return number

    def remove(self, number: int) -> None:
        """A run is gone."""
        self.columns[:, number] = 0
        self._free.append(number)
