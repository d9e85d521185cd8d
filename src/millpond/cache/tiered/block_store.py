"""Store of blocks of prompts on a disk: pages of all layers, with checksums, up to a limit of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.cache.state.sum_bytes import SumForm
from millpond.cache.swap import read_pages, write_pages
from millpond.cache.tiered.extents import GRAIN, GrowingFile, LayerExtents, Transit
from millpond.errors import DataError
from millpond.kernels.args import RunsInBuffer
from millpond.kernels.checksum import crc32
from millpond.tiers.buffers import Slot, aligned_buffer, aligned_up
from millpond.tiers.files import ScratchFile
from millpond.tiers.loader import Backend, Loader
from millpond.tiers.threads import ThreadBackend

#: Slots that blocks are read and written through, and bytes of each.
N_READING, N_WRITING, SLOT_BYTES = 2, 2, 256 << 10
#: Bytes of memory that a store takes.
STORE_BYTES = (N_READING + N_WRITING) * SLOT_BYTES

Pools = Sequence[RefCountedPool[Any]]


@dataclass(slots=True, eq=False)
class StoredBlock:
    """A block on the disk.

    Attributes:
        runs: Numbers of the runs that hold its bytes, in their order.
        counts: Pages of each layer; empty where it holds codes.
        nbytes: Its bytes, without those of sums, which follow them.
        on_evicted: Function that is called when the block is evicted.
        sums: What the bytes of its sums mean.
    """

    runs: list[int]
    counts: list[int]
    nbytes: int
    on_evicted: Callable[[], None]
    sums: tuple[SumForm, ...] = ()


class BlockStore:
    """Blocks of pages on a disk; a new one evicts the least recently used.

    If the disk has less than the limit, the size of the file becomes the limit.

    Args:
        folder: Folder of the file, which has no name there.
        capacity_bytes: Most bytes of the file.
        backend: Executor of reads and writes; None for two threads.
        open_file: Function that creates a file in the folder.

    Raises:
        DataError: no file can be made there.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        backend: Backend | None = None,
        open_file: Callable[[Path], GrowingFile] = ScratchFile,
    ) -> None:
        file = open_file(folder)
        slots = [Slot(aligned_buffer(SLOT_BYTES)) for _ in range(N_READING + N_WRITING)]
        self._loader = Loader(backend or ThreadBackend(2))
        self._extents = LayerExtents(file, Transit(self._loader, slots[:N_READING], slots[N_READING:]))
        self._capacity = capacity_bytes
        self._blocks: dict[StoredBlock, None] = {}  # the longest unused first

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    @property
    def bytes_used(self) -> int:
        """Bytes of the file that are in use now."""
        return self._extents.used

    def put(
        self,
        pools: Pools,
        pages: Sequence[PageIds],
        on_evicted: Callable[[], None],
        sums: tuple[Tensor, tuple[SumForm, ...]] | None = None,
    ) -> StoredBlock | None:
        """Write a block; return None if there is no room for it.

        Args:
            pools: Pool of each layer.
            pages: Pages of each layer.
            on_evicted: Function that is called when the block is evicted, and not when it is freed.
            sums: Sums that are kept with it, see `pack_sums`; None: none are.
        """
        return self._put(_packed(pools, pages), [len(ids) for ids in pages], on_evicted, sums)

    def put_codes(
        self, codes: Tensor, on_evicted: Callable[[], None], sums: tuple[Tensor, tuple[SumForm, ...]] | None = None
    ) -> StoredBlock | None:
        """Write a block that is bytes already, (n,) uint8 on the CPU; see `put`."""
        return self._put(codes, [], on_evicted, sums)

    def _put(
        self,
        data: Tensor,
        counts: list[int],
        on_evicted: Callable[[], None],
        sums: tuple[Tensor, tuple[SumForm, ...]] | None,
    ) -> StoredBlock | None:
        nbytes = len(data)
        if sums is not None:
            data = torch.cat([data, sums[0]])
        runs: list[int] = []
        for begin in range(0, len(data), SLOT_BYTES):
            part = data[begin : begin + SLOT_BYTES]
            if not self._make_room(aligned_up(len(part))):
                for run in runs:
                    self._extents.free(run)
                return None
            runs.append(self._extents.write(partial(_fill, part), len(part), 1))
        block = StoredBlock(runs, counts, nbytes, on_evicted, () if sums is None else sums[1])
        self._blocks[block] = None
        return block

    def use(self, block: StoredBlock) -> None:
        """Record a use of a block, which is then evicted last."""
        del self._blocks[block]
        self._blocks[block] = None

    def read(self, block: StoredBlock) -> Tensor:
        """Return the bytes of a block, (n,) uint8, for `unpack`.

        Raises:
            DataError: they could not be written or read, or are not those that were written.
        """
        extents, runs = self._extents, np.array(block.runs, dtype=np.int64)
        for lost in extents.lost(runs).values():
            raise lost
        needed = extents.runs.needed[runs]
        room, order = torch.empty(int(needed.sum()), dtype=torch.uint8), extents.in_order(runs)
        ends = np.cumsum(needed)[order].tolist()

        def take(part: slice, data: Tensor, read: RunsInBuffer) -> int:
            for n, place in enumerate(read.places.tolist()):
                nbytes = int(needed[order[part.start + n]])
                one = data[place : place + nbytes]
                if crc32(one, int(read.generations[n])) != read.checksums[n]:
                    return n
                room[ends[part.start + n] - nbytes : ends[part.start + n]] = one
            return len(read.places)

        errors = [errand.finish() for errand, _ in extents.read(runs[order], take)]
        for error in errors:
            if error is not None:
                raise error
        return room

    def free(self, block: StoredBlock) -> None:
        """Free the space of a block."""
        del self._blocks[block]
        for run in block.runs:
            self._extents.free(run)

    def close(self) -> None:
        """End reads and writes and free the disk; a second call changes nothing."""
        self._loader.close()
        self._extents.close()

    def _make_room(self, nbytes: int) -> bool:
        """Whether a run of `nbytes` fits; evicts the least recently used blocks for it."""
        extents = self._extents
        while (more := extents.growth(nbytes)) > 0:
            spare = self._capacity - extents.size
            if more <= spare:
                try:
                    extents.reserve(extents.size + max(more, min(GRAIN, spare)))
                except DataError:  # the disk is full
                    self._capacity = extents.size
            elif self._blocks:
                oldest = next(iter(self._blocks))
                self.free(oldest)
                oldest.on_evicted()
            else:
                return False
        return True


def unpack(pools: Pools, pages: Sequence[PageIds], data: Tensor) -> None:
    """Write the bytes that `BlockStore.read` returned to as many pages of the same pools."""
    begin = 0
    for pool, ids in _by_pool(pools, pages):
        content = []
        for arenas in pool.arrays.arrays:
            shape, dtype = (len(ids), *arenas[0].shape[1:]), arenas[0].dtype
            end = begin + int(np.prod(shape)) * dtype.itemsize
            content.append(data[begin:end].clone().view(dtype).reshape(shape))
            begin = end
        write_pages(pool, ids, tuple(content))
    assert begin == len(data), "the block has these pages"


def _packed(pools: Pools, pages: Sequence[PageIds]) -> Tensor:
    """Return all that pages hold, positions and scores included, (n,) uint8."""
    arrays = [array for pool, ids in _by_pool(pools, pages) for array in read_pages(pool, ids)]
    return torch.cat([array.reshape(-1).view(torch.uint8) for array in arrays])


def _by_pool(pools: Pools, pages: Sequence[PageIds]) -> Iterator[tuple[RefCountedPool[Any], PageIds]]:
    """Yield the pages of all layers of each pool together, in the order of the pools."""
    for pool in dict.fromkeys(pools):
        yield pool, np.concatenate([ids for own, ids in zip(pools, pages, strict=True) if own is pool])


def _fill(data: Tensor, room: Tensor, generation: int) -> int:
    room[: len(data)] = data
    room[len(data) :] = 0
    return crc32(room[: len(data)], generation)
