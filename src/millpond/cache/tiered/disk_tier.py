"""KV on a disk: the pages of a layer are read before it runs and written after it, while others are computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.ref_counted_pool import Pool, RefCountedPool
from millpond.cache.swap import parts_of
from millpond.cache.tiered.extents import GrowingFile, LayerExtents, Transit
from millpond.cache.tiered.offloaded_pages import OffloadedPages
from millpond.cache.tiered.page_fetch import PageFetch
from millpond.cache.tiered.write_back import write_back
from millpond.errors import DataError, PoolFullError
from millpond.tiers.buffers import Slot, aligned_buffer
from millpond.tiers.files import ScratchFile
from millpond.tiers.ledger import Ledger
from millpond.tiers.loader import Backend, Loader
from millpond.tiers.threads import ThreadBackend

#: Slots that pages are read through, and written from.
N_READING, N_WRITING = 2, 2
N_SLOTS = N_READING + N_WRITING
#: Bytes of a slot, which is what is read in one request: usually, and at least so that a disk is not slow.
SLOT_BYTES, LEAST_SLOT_BYTES = 1 << 20, 256 << 10


class DiskTier:
    """Layers whose keys and values are stored on a disk, for all requests of an engine.

    Positions, scores and masses stay in memory. So do pages that are not full, for methods that keep their entries, and
    entries that were written over others until there are enough of them. `in_memory` reads the rest for one pass.

    Args:
        folder: Folder of the files, which have no name there.
        layers: Indices of the layers.
        ledger: Ledger that counts the slots in the tier "host" and the files in "disk"; None for none.
        slot_bytes: Bytes of each of the four slots.
        micro_batch: Sequences whose pages of a layer are in memory at a time; None for all that decode with one method.
        backend: Executor of reads and writes; None for two threads.
        overlap: Whether the next layer is read while one is computed.
        open_file: Function that creates a file in the folder.

    Raises:
        DataError: no file can be made there.
        BudgetError: the ledger has too few bytes.
    """

    def __init__(
        self,
        folder: Path,
        layers: Collection[int],
        *,
        ledger: Ledger | None = None,
        slot_bytes: int = SLOT_BYTES,
        micro_batch: int | None = None,
        backend: Backend | None = None,
        overlap: bool = True,
        open_file: Callable[[Path], GrowingFile] = ScratchFile,
    ) -> None:
        self.folder, self.layers, self.micro_batch = folder, frozenset(layers), micro_batch
        self._holdings = [] if ledger is None else [ledger.take("host", "kv slots", N_SLOTS * slot_bytes)]
        self._ledger = ledger
        files: dict[int, GrowingFile] = {}
        try:
            for layer in sorted(self.layers):
                files[layer] = open_file(folder)
        except BaseException:
            for file in files.values():
                file.close()
            raise
        slots = [Slot(aligned_buffer(slot_bytes)) for _ in range(N_SLOTS)]
        self._loader = Loader(backend or ThreadBackend(2))
        self._transit = Transit(self._loader, slots[:N_READING], slots[N_READING:])
        self._extents = {layer: LayerExtents(file, self._transit, self._take) for layer, file in files.items()}
        self._overlap = overlap
        self._offloaded: dict[tuple[int, RefCountedPool[Any]], OffloadedPages] = {}
        self._coming: dict[LayerCache, list[PageFetch]] = {}
        self._reserved: dict[str, int] = {}

    # ------------------------------------------------------------------ figures

    @property
    def bytes_read(self) -> int:
        """Bytes of files that were read so far."""
        return self._transit.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes that were written to files so far."""
        return self._transit.bytes_written

    @property
    def bytes_used(self) -> int:
        """Bytes of files that are in use now."""
        return sum(extents.used for extents in self._extents.values())

    # ------------------------------------------------------------------ room

    def reserve(self, name: str, layer_bytes: int) -> None:
        """Reserve the disk for a request that holds `layer_bytes` in each layer, until `release`.

        Raises:
            DataError: the disk lacks them; nothing is reserved for it.
        """
        self._reserved[name] = layer_bytes
        try:
            for extents in self._extents.values():
                extents.reserve(sum(self._reserved.values()))
        except DataError:
            del self._reserved[name]
            raise

    def has_reserved(self, name: str) -> bool:
        """Return whether the disk of a request is reserved."""
        return name in self._reserved

    def release(self, name: str) -> None:
        """End the reservation of a request."""
        self._reserved.pop(name, None)

    # ------------------------------------------------------------------ a pass

    @contextmanager
    def in_memory(
        self, layer_cache: LayerCache, then: Iterable[LayerCache] = (), growth: Mapping[Pool, int] | None = None
    ) -> Iterator[None]:
        """Keep the pages of a layer in their pool while it runs.

        Args:
            layer_cache: Cache of the layer.
            then: Caches that run next, in their order, whose pages are read meanwhile: of the first if there is room
                for them, of each later one if there is room for twice as many.
            growth: Pages that the rest of the pass may take, for which room is left.
        """
        if layer_cache.index not in self.layers:
            self._fetch_ahead(then, growth or {})
            yield
            return
        fetches: list[PageFetch] = []
        try:
            fetches = self._bring(layer_cache, then, growth or {})
            frames = None if layer_cache.frames is None else layer_cache.frames.copy()
            yield
            self._send(layer_cache, fetches, frames)
        except BaseException:
            self._abandon(fetches)
            self._cancel()
            raise

    def is_on_disk(self, layer_cache: LayerCache) -> bool:
        """Whether the pages of a layer are written back after each pass."""
        return layer_cache.index in self.layers

    def pages(self, layer: int, pool: RefCountedPool[Any]) -> OffloadedPages:
        """Return the offloaded pages of a layer that belong to a pool."""
        key = layer, pool
        if key not in self._offloaded:
            self._offloaded[key] = OffloadedPages(pool, self._extents[layer])
        return self._offloaded[key]

    def window(self, layer_cache: LayerCache, growth: Mapping[Pool, int]) -> tuple[dict[Pool, int], dict[Pool, int]]:
        """Return the pages that a pass takes for a layer that may grow by `growth`.

        The first are taken while the layer is in memory, the second for good.
        """
        in_memory: dict[Pool, int] = dict(growth)
        stays: dict[Pool, int] = {}
        table = layer_cache.table
        if table is None:
            return in_memory, stays
        for part in parts_of(table):
            lists, more = part.page_lists, growth.get(part.pool, 0)
            offloaded = self.pages(layer_cache.index, part.pool)
            stays[offloaded] = more
            if lists.pool is offloaded:
                in_memory[part.pool] = more + int((offloaded.resident[lists.held()] < 0).sum())
        stays[table.pool] = min(growth.get(table.pool, 0), table.n_regions)
        return in_memory, stays

    def close(self) -> None:
        """End reads and writes and free the disk; a second call changes nothing."""
        self._loader.close()
        for extents in self._extents.values():
            extents.close()
        for holding in self._holdings:
            holding.release()

    # ------------------------------------------------------------------ internal

    def _take(self, nbytes: int) -> None:
        """Count bytes by which the files have grown."""
        if self._ledger is not None:
            self._holdings.append(self._ledger.take("disk", "kv", nbytes))

    def _bring(
        self, layer_cache: LayerCache, then: Iterable[LayerCache], growth: Mapping[Pool, int]
    ) -> list[PageFetch]:
        table = layer_cache.table
        if table is None or not table.is_offloaded:
            return []
        parts = parts_of(table)
        fetches = self._coming.pop(layer_cache, None) or self._begin(layer_cache)
        self._fetch_ahead(then, growth)
        for part, fetch in zip(parts, fetches, strict=True):
            fetch.end(part)
            layer_cache.failed |= fetch.failed_sequences(part)
        return fetches

    def _begin(self, layer_cache: LayerCache) -> list[PageFetch]:
        fetches: list[PageFetch] = []
        assert layer_cache.table is not None, "there is something to read"
        parts = parts_of(layer_cache.table)
        try:
            for part in parts:
                fetches.append(PageFetch.begin(part))
        except PoolFullError:
            for part, fetch in zip(parts, fetches, strict=False):
                fetch.cancel(part.pool)
            raise
        return fetches

    def _fetch_ahead(self, then: Iterable[LayerCache], growth: Mapping[Pool, int]) -> None:
        """Begin to read the pages of caches, up to the first for which there is no room."""
        if not self._overlap:
            return
        spare = 1
        for layer_cache in then:
            table = layer_cache.table
            if layer_cache in self._coming or table is None or not table.is_offloaded:
                continue
            need = dict(growth)
            for part in parts_of(table):
                need[part.pool] = need.get(part.pool, 0) + spare * len(part.held())
                if not part.pool.can_allocate(need[part.pool]):
                    return
            memory_limit = table.pool.memory_limit
            if memory_limit is not None and not memory_limit.can_take(need):
                return
            spare = 2
            self._coming[layer_cache] = self._begin(layer_cache)

    def _send(self, layer_cache: LayerCache, fetches: list[PageFetch], frames: np.ndarray | None) -> None:
        table = layer_cache.table
        if table is None:
            return self._abandon(fetches)
        by_pool = {fetch.offloaded: fetch for fetch in fetches}
        rewritten = None
        if layer_cache.merges_each_step:
            rewritten = np.ones(table.n_seq, dtype=bool)
        elif frames is not None and layer_cache.frames is not None and len(frames) == len(layer_cache.frames):
            rewritten = frames != layer_cache.frames
        for part in parts_of(table):
            offloaded = self.pages(layer_cache.index, part.pool)
            fetch = by_pool.pop(offloaded, None)
            layer_cache.failed |= write_back(part, offloaded, fetch, appends=layer_cache.appends, rewritten=rewritten)
            if fetch is not None:
                fetches.remove(fetch)
        self._abandon(fetches)

    def _abandon(self, fetches: list[PageFetch]) -> None:
        """Release the offloaded pages that these fetches hold."""
        while fetches:
            fetch = fetches.pop()
            fetch.offloaded.release(fetch.held)

    def _cancel(self) -> None:
        """Cancel reads ahead, as the pass has ended."""
        for layer_cache, fetches in self._coming.items():
            assert layer_cache.table is not None, "what is fetched was offloaded"
            for part, fetch in zip(parts_of(layer_cache.table), fetches, strict=True):
                fetch.cancel(part.pool)
        self._coming.clear()
