"""A matrix that stays in its file: where some of its rows lie, and how they are used where they were read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from millpond.kernels.quantized_weight import QuantizedWeight, Weight
from millpond.models.weights.layout import FileRun
from millpond.tiers.buffers import ALIGNMENT, aligned_down, aligned_up

#: Rows of a tile are a multiple of this where that many fit, as kernels take rows of a matrix.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class MatrixOnDisk:
    """A matrix (n_rows, width) in a file, as numbers or as codes and their scales, row after row.

    Attributes:
        spans: offset in the file and bytes of a row: of the numbers, or of codes and of scales. dtype: of its numbers,
            or of the rows that codes meet. bits: of a code; None: as numbers.
    """

    path: Path
    n_rows: int
    width: int
    spans: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    bits: int | None = None

    def weight(self, parts: Sequence[Tensor], n: int) -> Weight:
        """Some n of its rows, from the bytes (m,) uint8 of each span."""
        if self.bits is None:
            return parts[0].view(self.dtype).view(n, self.width)
        (shape, dtype), scales = QuantizedWeight.parts_of(n, self.width, self.bits)
        return QuantizedWeight(parts[0].view(dtype).view(shape), parts[1].view(torch.float16).view(scales), self.dtype)

    def rows(self, begin: int, end: int) -> RowRange:
        """Where the rows from `begin` to before `end` lie."""
        assert 0 <= begin < end <= self.n_rows, "rows of the matrix"
        runs, places, place = list[FileRun](), list[tuple[int, int]](), 0
        for offset, row_bytes in self.spans:
            first, n = offset + begin * row_bytes, (end - begin) * row_bytes
            down = aligned_down(first)
            needed = first + n - down
            runs.append(FileRun(self.path, down, aligned_up(needed), needed, place))
            places.append((place + first - down, n))
            place += aligned_up(needed)
        return RowRange(self, begin, end, tuple(runs), tuple(places), place)

    def tiles(self, nbytes: int) -> tuple[RowRange, ...]:
        """All rows in ranges of about the same size, each at most `nbytes` where it is read, but of at least a row."""
        most = max(1, (nbytes - ALIGNMENT * len(self.spans)) // sum(row_bytes for _, row_bytes in self.spans))
        while most > 1 and self.room_bytes(most) > nbytes:
            most -= 1
        rows = -(-self.n_rows // -(-self.n_rows // most))
        rows = min(-(-rows // _ROWS) * _ROWS, most // _ROWS * _ROWS) or rows
        return tuple(self.rows(i, min(i + rows, self.n_rows)) for i in range(0, self.n_rows, rows))

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return self.n_rows * sum(row_bytes for _, row_bytes in self.spans)

    def room_bytes(self, n: int) -> int:
        """Of a buffer that any n rows are read into."""
        return sum(aligned_up(n * row_bytes) + ALIGNMENT for _, row_bytes in self.spans)

    @property
    def least_tile_bytes(self) -> int:
        """Of a buffer for the smallest tile that is worth a read."""
        return self.room_bytes(min(_ROWS, self.n_rows))


@dataclass(frozen=True, slots=True)
class RowRange:
    """Some rows of a matrix: what is read, and where they lie then.

    Attributes:
        runs: of the file. places: in a buffer: first byte and bytes of each span. nbytes: of the buffer.
    """

    matrix: MatrixOnDisk
    begin: int
    end: int
    runs: tuple[FileRun, ...]
    places: tuple[tuple[int, int], ...]
    nbytes: int

    def parts(self, data: Tensor) -> list[Tensor]:
        """Bytes (m,) uint8 of each span, as views of a buffer (n,) uint8."""
        return [data[place : place + n] for place, n in self.places]

    def weight(self, data: Tensor) -> Weight:
        """The rows, as a view of a buffer (n,) uint8."""
        return self.matrix.weight(self.parts(data), self.end - self.begin)
