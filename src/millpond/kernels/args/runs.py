"""Runs of pages in a buffer that a disk is read or written through."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class RunsInBuffer(NamedTuple):
    """Runs of pages in a buffer, each of them array after array. All (n,) int64.

    Attributes:
        places: where each begins, in bytes. n_pages: that it holds. generations: what its checksum begins with.
        checksums: CRC-32 of its bytes.
    """

    places: Numbers
    n_pages: Numbers
    generations: Numbers
    checksums: Numbers


class WantedPages(NamedTuple):
    """Pages of runs that are wanted, those of a run together. Both int64.

    Attributes:
        rows: (m,) which page of its run. ids: (m,) the page of a pool that it becomes.
    """

    rows: Numbers
    ids: Numbers
