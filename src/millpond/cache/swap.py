"""Pages moved out of the pool to host memory or files, and back, bit for bit."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.errors import DataError, OptionError
from millpond.kernels.checksum import crc32
from millpond.kernels.page_rows import PagePart, RowArrays, move_rows, take

#: What holds pages: the plain part of a table, or a packed one.
Holder = PageTable | QuantizedStore
#: What pages hold, (n, ...) per array of their pool.
Content = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class SwappedPages:
    """The pages of one part of a table outside its pool.

    Attributes:
        pool: Pool that they have left.
        owned: Pages per region, (R,).
        arrays: Content of all pages, each once, on the host; none where it lies elsewhere.
        which: Index in `arrays` of each held page, (held,), in the order of the regions; several hold shared ones.
    """

    pool: RefCountedPool[Any]
    owned: npt.NDArray[Any]
    arrays: Content
    which: npt.NDArray[np.int64]

    @property
    def n_pages(self) -> int:
        return int(self.which.max(initial=-1)) + 1

    @property
    def nbytes(self) -> int:
        """Bytes of the content."""
        return sum(array.nbytes for array in self.arrays)


def copy_out(table: PageTable) -> list[Content]:
    """Return the content of the table's pages, each once, on the host, for each of its parts."""
    return [read_pages(part.pool, np.unique(part.held())) for part in parts_of(table)]


def release_all(table: PageTable, content: list[Content]) -> list[SwappedPages]:
    """Release the table's pages, of which `copy_out` returned the `content`.

    Afterwards the table may only be restored, or cleared.
    """
    swapped = []
    for part, arrays in zip(parts_of(table), content, strict=True):
        which = np.unique(part.held(), return_inverse=True)[1].reshape(-1)
        swapped.append(SwappedPages(part.pool, part.release_all(), arrays, which))
    return swapped


def restore(table: PageTable, carried: list[SwappedPages]) -> None:
    """Put the content, where there is some, into fresh pages, which the table holds again.

    Raises:
        PoolFullError: there is no room; nothing was changed.
    """
    taken: list[PageIds] = []
    try:
        for one in carried:
            taken.append(one.pool.allocate(one.n_pages))
    except BaseException:
        for one, ids in zip(carried, taken, strict=False):
            one.pool.release(ids)
        raise
    for part, one, ids in zip(parts_of(table), carried, taken, strict=True):
        if one.arrays:
            write_pages(one.pool, ids, one.arrays)
        part.restore(ids[one.which], one.owned)
        more = np.bincount(one.which, minlength=len(ids)) - 1
        one.pool.retain(np.repeat(ids, more))


def read_pages(pool: RefCountedPool[Any], ids: PageIds, part: PagePart = PagePart.ALL) -> Content:
    """Return the content of pages: of all arrays of the pool, or of some."""
    return tuple(take(RowArrays.of_pages(pool.arrays, part), ids))


def write_pages(pool: RefCountedPool[Any], ids: PageIds, content: Content, part: PagePart = PagePart.ALL) -> None:
    """Write content that `read_pages` returned of other pages, of the same arrays."""
    move_rows(RowArrays.of_tensors(content), None, RowArrays.of_pages(pool.arrays, part), ids, len(ids))


def parts_of(table: PageTable) -> list[Holder]:
    """Return the parts of a table that hold pages: the plain one, then the packed ones."""
    return [table, *table.packed_parts]


class Mark(NamedTuple):
    """Identity of a tensor; checksum: CRC-32 of its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int


def mark(tensor: Tensor) -> Mark:
    """Return the identity of a tensor on the host."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return Mark(tuple(tensor.shape), tensor.dtype, crc32(flat))


class SwapFile:
    """A file with the content of one batch cache's pages.

    Args:
        path: Path of the file.
        parts: Number of parts of each table.
        written: Identity of each tensor of the file, by name.
    """

    def __init__(self, path: Path, parts: list[int], written: dict[str, Mark]) -> None:
        self._path = path
        self._parts = parts
        self._written = written

    def read(self) -> list[list[Content]]:
        """Return the content that `SwapFiles.write` wrote.

        Raises:
            DataError: the file is gone, broken, or holds something else than was written.
        """
        try:
            with safe_open(self._path, "pt") as file:
                self._check_shapes({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in self._written}
            for name, tensor in tensors.items():
                if mark(tensor) != self._written[name]:
                    raise DataError(self._lost("its content is not what was written"))
            return [[_arrays(tensors, f"{i}.{j}.") for j in range(n)] for i, n in enumerate(self._parts)]
        except (OSError, SafetensorError) as error:
            raise DataError(self._lost(str(error))) from error

    def _check_shapes(self, shapes: dict[str, list[int]]) -> None:
        """Check the tensors of the file before they are read.

        Raises:
            DataError: other tensors than those that were written; none of them was read.
        """
        if shapes != {name: list(one.shape) for name, one in self._written.items()}:
            raise DataError(self._lost("it holds other tensors than were written"))

    def _lost(self, why: str) -> str:
        return (
            f"{str(self._path)!r} cannot be read ({why}), so what its request remembered is lost: ask it again, and "
            "let no other process write to the swap folder"
        )

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


class SwapFiles:
    """A folder of swap files. Close it: nothing in it outlives its engine.

    Args:
        folder: Existing folder, in which a new one is made for the files.

    Raises:
        OptionError: there is no such folder, or nothing can be written to it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        name = os.fspath(folder)
        if not os.path.isdir(name):
            raise OptionError(f"swap_to={name!r} is no folder: make it first, or name another")
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="millpond-swap-", dir=name))
        except OSError as error:
            raise OptionError(f"swap_to={name!r}: no file can be made there ({error}); name another folder") from error
        self._numbers = count()

    def write(self, content: list[list[Content]]) -> SwapFile:
        """Write the content of each table's parts to a new file.

        Raises:
            DataError: it cannot be written; no file is left.
        """
        tensors = {
            f"{i}.{j}.{k}": array
            for i, parts in enumerate(content)
            for j, arrays in enumerate(parts)
            for k, array in enumerate(arrays)
        }
        path = self.folder / f"{next(self._numbers)}.safetensors"
        try:
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            n_bytes = sum(array.nbytes for array in tensors.values())
            raise DataError(
                f"{n_bytes} bytes of a cache that must make room cannot be written to {str(path)!r} ({error}): free "
                "space there, name another folder, or leave swap_to out to keep them in memory"
            ) from error
        return SwapFile(path, [len(parts) for parts in content], {name: mark(t) for name, t in tensors.items()})

    def close(self) -> None:
        """Remove the folder and all files in it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _arrays(tensors: dict[str, Tensor], prefix: str) -> Content:
    """Return the arrays of one part, in their order."""
    arrays = {int(name.removeprefix(prefix)): array for name, array in tensors.items() if name.startswith(prefix)}
    return tuple(arrays[i] for i in sorted(arrays))
