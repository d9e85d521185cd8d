"""Embeddings, head and matrices that stay in their file: rows that are looked up, and tiles in each sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millpond.errors import DataError
from millpond.kernels.checksum import crc32
from millpond.kernels.quantized_weight import QuantizedWeight, Weight
from millpond.models.lean.decoder import Multiply
from millpond.models.weights.layout import FileRun, Layout, TensorPlace
from millpond.models.weights.packed_layout import CodedLayout
from millpond.models.weights.skeleton import Skeleton
from millpond.tiers.buffers import ALIGNMENT, aligned_buffer, aligned_down, aligned_up
from millpond.tiers.loader import transfer

#: Rows of a tile are a multiple of this where that many fit, as kernels take rows of a matrix.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class MatrixOnDisk:
    """Matrix (n_rows, width) in a file, as numbers or as codes and scales, row after row.

    Attributes:
        spans: Offset in the file and bytes of a row: of the numbers, or of codes and of scales.
        dtype: Dtype of its numbers, or of the rows that codes are multiplied with.
        bits: Bits of a code; None for plain numbers.
    """

    path: Path
    n_rows: int
    width: int
    spans: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    bits: int | None = None

    def weight(self, parts: Sequence[Tensor], n: int) -> Weight:
        """Return n of its rows from the bytes (m,) uint8 of each span."""
        if self.bits is None:
            return parts[0].view(self.dtype).view(n, self.width)
        (shape, dtype), scales = QuantizedWeight.parts_of(n, self.width, self.bits)
        return QuantizedWeight(parts[0].view(dtype).view(shape), parts[1].view(torch.float16).view(scales), self.dtype)

    def rows(self, begin: int, end: int) -> RowRange:
        """Return the place of the rows from `begin` to before `end`."""
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
        """Return all rows in ranges of about the same size, each read at most `nbytes`.

        A range has at least a row.
        """
        max_rows = max(1, (nbytes - ALIGNMENT * len(self.spans)) // sum(row_bytes for _, row_bytes in self.spans))
        while max_rows > 1 and self.room_bytes(max_rows) > nbytes:
            max_rows -= 1
        rows = -(-self.n_rows // -(-self.n_rows // max_rows))
        rows = min(-(-rows // _ROWS) * _ROWS, max_rows // _ROWS * _ROWS) or rows
        return tuple(self.rows(i, min(i + rows, self.n_rows)) for i in range(0, self.n_rows, rows))

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.n_rows * sum(row_bytes for _, row_bytes in self.spans)

    def room_bytes(self, n: int) -> int:
        """Return the bytes of a buffer that any n rows are read into."""
        return sum(aligned_up(n * row_bytes) + ALIGNMENT for _, row_bytes in self.spans)

    @property
    def least_tile_bytes(self) -> int:
        """Bytes of a buffer for the smallest tile that is worth a read."""
        return self.room_bytes(min(_ROWS, self.n_rows))


@dataclass(frozen=True, slots=True)
class RowRange:
    """Range of rows of a matrix: the runs to read, and the places of its bytes then.

    Attributes:
        runs: Runs of the file.
        places: First byte and bytes of each span in a buffer.
        nbytes: Bytes of the buffer.
    """

    matrix: MatrixOnDisk
    begin: int
    end: int
    runs: tuple[FileRun, ...]
    places: tuple[tuple[int, int], ...]
    nbytes: int

    def parts(self, data: Tensor) -> list[Tensor]:
        """Return bytes (m,) uint8 of each span, as views of a buffer (n,) uint8."""
        return [data[place : place + n] for place, n in self.places]

    def weight(self, data: Tensor) -> Weight:
        """Return the rows, as a view of a buffer (n,) uint8."""
        return self.matrix.weight(self.parts(data), self.end - self.begin)


@dataclass(frozen=True, slots=True)
class EndsOnDisk:
    """Places of the weights outside the layers that stay in a file.

    Attributes:
        rest: Layout of what stays in memory: all but embeddings and head.
        tokens: Embeddings; the same matrix as `head` if they are tied.
        head: Last matrix.
        whole: Part of a packed file, with its checksum; None if there is none.
    """

    rest: Layout
    tokens: MatrixOnDisk
    head: MatrixOnDisk
    whole: FileRun | None

    @classmethod
    def of(cls, skeleton: Skeleton, ends: Layout | CodedLayout) -> EndsOnDisk:
        """Return the places of embeddings and head of a model.

        Args:
            skeleton: Model without its weights.
            ends: Layout of everything outside the layers; packed ones need no file yet.
        """
        tokens, head = skeleton.tokens_name, skeleton.head_name
        if isinstance(ends, CodedLayout):
            path = ends.path or Path()
            places = {
                name: replace(tensor_place, path=path, offset=ends.offset + at)
                for name, (tensor_place, at) in ends.plain.items()
            }
            matrices = _coded(ends, path)
            first_run = None if ends.path is None else ends.runs[0]
        else:
            places, matrices, first_run = dict(skeleton.ends), {}, None
        for name in {tokens, head} - set(matrices):
            matrices[name] = _plain(places[name])
        rest = {name: place for name, place in places.items() if name not in (tokens, head)}
        return cls(Layout.of(rest, gap=0), matrices[tokens], matrices[head], first_run)

    @property
    def held_bytes(self) -> int:
        """Bytes of what stays in memory, without a buffer for a row of the embeddings."""
        return aligned_up(self.rest.nbytes)

    @property
    def row_room_bytes(self) -> int:
        """Bytes of the buffer that a row of the embeddings is read into."""
        return self.tokens.room_bytes(1)

    @property
    def saved_bytes(self) -> int:
        """Bytes of embeddings and head in their file; once if they are one matrix."""
        return sum(matrix.nbytes for matrix in {self.tokens, self.head})

    @property
    def least_slot_bytes(self) -> int:
        """Bytes of a slot that tiles of the head pass through."""
        return self.head.least_tile_bytes

    def check(self, file: Any, room: Tensor) -> int:
        """Compare the part of a packed file with its checksum; return the bytes read.

        Raises:
            DataError: it cannot be read, or was damaged.
        """
        run = self.whole
        if run is None:
            return 0
        numbers: Any = room.numpy()
        view, crc = memoryview(numbers), 0
        for begin in range(0, run.nbytes, len(view)):
            n = min(len(view), run.nbytes - begin)
            needed = max(0, min(n, run.needed - begin))
            transfer(file.read_into, file, run.offset + begin, view[:n], needed, "read")
            crc = crc32(room[:needed], crc)
        if crc != run.checksum:
            raise DataError(
                f"{run.path} at offset {run.offset:,}: {run.needed:,} bytes have the checksum {crc:08x} "
                f"instead of {run.checksum:08x}; the file was damaged: remove it, so that it is made again"
            )
        return run.nbytes


class _Matrix:
    """Matrix in a file, as code that computes with it sees it."""

    def __init__(self, matrix: MatrixOnDisk) -> None:
        self._matrix = matrix

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that its numbers are computed with."""
        return self._matrix.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(n, width)."""
        return self._matrix.n_rows, self._matrix.width


class TokenRows(_Matrix):
    """Embeddings in a file, of which each look-up reads the rows that it needs.

    Args:
        matrix: Embeddings in the file.
        file: File with the matrix.
        count: Called with the bytes of each read.
    """

    def __init__(self, matrix: MatrixOnDisk, file: Any, count: Callable[[int], None]) -> None:
        super().__init__(matrix)
        self._file, self._count = file, count
        self._room = aligned_buffer(matrix.room_bytes(1))
        numbers: Any = self._room.numpy()
        self._view = memoryview(numbers)

    def __len__(self) -> int:
        return self._matrix.n_rows

    def take(self, ids: Tensor) -> Tensor:
        """Return rows `ids` (N,) as numbers (N, width); each different one is read once.

        Raises:
            DataError: a row could not be read.
        """
        rows, where = torch.unique(ids, return_inverse=True)
        sizes = [row_bytes for _, row_bytes in self._matrix.spans]
        buffers = [torch.empty(len(rows), n, dtype=torch.uint8) for n in sizes]
        for at, row in enumerate(rows.tolist()):
            for buffer, read in zip(buffers, self._read(row), strict=True):
                buffer[at] = read
        weight = self._matrix.weight([buffer.view(-1) for buffer in buffers], len(rows))
        numbers = weight.widen() if isinstance(weight, QuantizedWeight) else weight
        return numbers.to(ids.device)[where]

    def _read(self, row: int) -> list[Tensor]:
        """Return the bytes of a row, until the next one is read."""
        place = self._matrix.rows(row, row + 1)
        for run in place.runs:
            buffer = self._view[run.place : run.place + run.nbytes]
            transfer(self._file.read_into, self._file, run.offset, buffer, run.needed, "read")
            self._count(run.nbytes)
        return place.parts(self._room)


class TiledHead(_Matrix):
    """Head whose matrix passes through memory in tiles of rows, each a part of the logits.

    Args:
        matrix: All of the matrix.
        tiles: Reads the tiles in order, each until the next: first row, and the rows.
    """

    def __init__(self, matrix: MatrixOnDisk, tiles: Callable[[], Iterable[tuple[RowRange, Weight]]]) -> None:
        super().__init__(matrix)
        self._tiles = tiles

    def product(self, x: Tensor, bias: Tensor | None, multiply: Multiply) -> Tensor:
        """Return (N, n) of rows x (N, width); without rows nothing is read.

        Raises:
            DataError: a tile could not be read.
        """
        out = x.new_empty(len(x), self._matrix.n_rows)
        if len(x):
            for tile, weight in self._tiles():
                some = slice(tile.begin, tile.end)
                out[:, some] = multiply(x, weight, None if bias is None else bias[some])
        return out


def _plain(place: TensorPlace) -> MatrixOnDisk:
    n, width = place.shape
    return MatrixOnDisk(place.path, n, width, ((place.offset, place.nbytes // n),), place.dtype)


def _coded(ends: CodedLayout, path: Path) -> dict[str, MatrixOnDisk]:
    """Return the matrices in codes, by name; each is on its own."""
    matrices = {}
    for matrix in ends.matrices:
        (name,), (n,) = matrix.names, matrix.rows
        (codes, _), scales = QuantizedWeight.parts_of(1, matrix.width, matrix.bits)
        spans = (
            (ends.offset + matrix.codes, codes[1] * codes[2]),
            (ends.offset + matrix.scales, 2 * scales[1] * scales[2]),
        )
        matrices[name] = MatrixOnDisk(path, n, matrix.width, spans, matrix.dtype, matrix.bits)
    return matrices
