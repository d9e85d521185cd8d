"""Embeddings and head that stay in their file: the head is read in tiles in each sweep, of embeddings the rows that are
looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millpond.errors import DataError
from millpond.kernels.checksum import crc32
from millpond.kernels.quantized_weight import QuantizedWeight, Weight
from millpond.models.lean.ends import Multiply
from millpond.models.weights.headers import TensorPlace
from millpond.models.weights.layout import FileRun, Layout
from millpond.models.weights.matrix_on_disk import MatrixOnDisk, RowRange
from millpond.models.weights.packed_layout import CodedLayout
from millpond.models.weights.skeleton import Skeleton
from millpond.tiers.buffers import aligned_buffer, aligned_up
from millpond.tiers.loader import transfer


@dataclass(frozen=True, slots=True)
class EndsOnDisk:
    """Where what lies outside the layers is read.

    Attributes:
        rest: layout of what stays in memory: all but embeddings and head. tokens, head: embeddings and the last matrix,
            one matrix where they are tied. whole: the part of a packed file, with its checksum; None where there is
            none.
    """

    rest: Layout
    tokens: MatrixOnDisk
    head: MatrixOnDisk
    whole: FileRun | None

    @classmethod
    def of(cls, skeleton: Skeleton, ends: Layout | CodedLayout) -> EndsOnDisk:
        """
        Args:
            ends: layout of all that lies outside the layers; packed ones need no file yet.
        """
        tokens, head = skeleton.tokens_name, skeleton.head_name
        if isinstance(ends, CodedLayout):
            path = ends.path or Path()
            places = {
                name: replace(held, path=path, offset=ends.offset + at) for name, (held, at) in ends.plain.items()
            }
            matrices = _coded(ends, path)
            whole = None if ends.path is None else ends.runs[0]
        else:
            places, matrices, whole = dict(skeleton.ends), {}, None
        for name in {tokens, head} - set(matrices):
            matrices[name] = _plain(places[name])
        rest = {name: place for name, place in places.items() if name not in (tokens, head)}
        return cls(Layout.of(rest, gap=0), matrices[tokens], matrices[head], whole)

    @property
    def held_bytes(self) -> int:
        """Of what stays in memory, besides a buffer for a row of the embeddings."""
        return aligned_up(self.rest.nbytes)

    @property
    def row_room_bytes(self) -> int:
        """Of the buffer that a row of the embeddings is read into."""
        return self.tokens.room_bytes(1)

    @property
    def saved_bytes(self) -> int:
        """Of embeddings and head in their file; once where they are one matrix."""
        return sum(matrix.nbytes for matrix in {self.tokens, self.head})

    @property
    def least_slot_bytes(self) -> int:
        """Of a slot that tiles of the head pass through."""
        return self.head.least_tile_bytes

    def check(self, file: Any, room: Tensor) -> int:
        """Compare the part of a packed file with its checksum, read through a buffer; returns the bytes read.

        Raises:
            DataError: it cannot be read, or was damaged.
        """
        whole = self.whole
        if whole is None:
            return 0
        numbers: Any = room.numpy()
        view, found = memoryview(numbers), 0
        for begin in range(0, whole.nbytes, len(view)):
            n = min(len(view), whole.nbytes - begin)
            needed = max(0, min(n, whole.needed - begin))
            transfer(file.read_into, file, whole.offset + begin, view[:n], needed, "read")
            found = crc32(room[:needed], found)
        if found != whole.checksum:
            raise DataError(
                f"{whole.path} at offset {whole.offset:,}: {whole.needed:,} bytes have the checksum {found:08x} "
                f"instead of {whole.checksum:08x}; the file was damaged: remove it, so that it is made again"
            )
        return whole.nbytes


class _Matrix:
    """A matrix in a file, to whoever computes with it."""

    def __init__(self, matrix: MatrixOnDisk) -> None:
        self._matrix = matrix

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers, as they are computed with."""
        return self._matrix.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(n, width)."""
        return self._matrix.n_rows, self._matrix.width


class TokenRows(_Matrix):
    """Embeddings in a file, of which each look-up reads the rows that it needs.

    Args:
        file: with the matrix. count: called with the bytes of each read.
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
        """Rows `ids` (N,) as numbers: (N, width); each different one is read once.

        Raises:
            DataError: a row could not be read.
        """
        rows, where = torch.unique(ids, return_inverse=True)
        sizes = [row_bytes for _, row_bytes in self._matrix.spans]
        found = [torch.empty(len(rows), n, dtype=torch.uint8) for n in sizes]
        for at, row in enumerate(rows.tolist()):
            for held, read in zip(found, self._read(row), strict=True):
                held[at] = read
        weight = self._matrix.weight([held.view(-1) for held in found], len(rows))
        numbers = weight.widen() if isinstance(weight, QuantizedWeight) else weight
        return numbers.to(ids.device)[where]

    def _read(self, row: int) -> list[Tensor]:
        """The bytes of a row, until the next one is read."""
        place = self._matrix.rows(row, row + 1)
        for run in place.runs:
            room = self._view[run.place : run.place + run.nbytes]
            transfer(self._file.read_into, self._file, run.offset, room, run.needed, "read")
            self._count(run.nbytes)
        return place.parts(self._room)


class TiledHead(_Matrix):
    """A head whose matrix passes through memory in tiles of some rows, each a part of the logits.

    Args:
        matrix: all of it. tiles: reads them in their order, each until the next: first row, and the rows.
    """

    def __init__(self, matrix: MatrixOnDisk, tiles: Callable[[], Iterable[tuple[RowRange, Weight]]]) -> None:
        super().__init__(matrix)
        self._tiles = tiles

    def product(self, x: Tensor, bias: Tensor | None, multiply: Multiply) -> Tensor:
        """(N, n) of rows x (N, width); without rows nothing is read.

        Raises:
            DataError: a tile could not be read.
        """
        found = x.new_empty(len(x), self._matrix.n_rows)
        if len(x):
            for tile, weight in self._tiles():
                some = slice(tile.begin, tile.end)
                found[:, some] = multiply(x, weight, None if bias is None else bias[some])
        return found


def _plain(place: TensorPlace) -> MatrixOnDisk:
    n, width = place.shape
    return MatrixOnDisk(place.path, n, width, ((place.offset, place.nbytes // n),), place.dtype)


def _coded(ends: CodedLayout, path: Path) -> dict[str, MatrixOnDisk]:
    """The matrices in codes, by name; each stands alone."""
    found = {}
    for matrix in ends.matrices:
        (name,), (n,) = matrix.names, matrix.rows
        (codes, _), scales = QuantizedWeight.parts_of(1, matrix.width, matrix.bits)
        spans = (
            (ends.offset + matrix.codes, codes[1] * codes[2]),
            (ends.offset + matrix.scales, 2 * scales[1] * scales[2]),
        )
        found[name] = MatrixOnDisk(path, n, matrix.width, spans, matrix.dtype, matrix.bits)
    return found
