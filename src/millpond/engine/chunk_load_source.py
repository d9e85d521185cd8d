"""Files of chunks as requests wait for them."""

from __future__ import annotations

from collections.abc import Callable

from millpond.engine.chunk_reuse import ChunkReuse
from millpond.engine.file_loader import LoadOrder
from millpond.engine.loaded_chunks import LoadedChunks
from millpond.engine.request_state import RequestState


class ChunkLoadSource:
    """See `LoadSource`. More requests ahead would find fewer of the chunks that those before them store."""

    name = "millpond-chunks"
    ahead = 4

    def __init__(self, reuse: ChunkReuse) -> None:
        self._reuse, self.limit = reuse, reuse.store.loading

    def wants(self, live: RequestState) -> bool:
        """A prompt with chunks."""
        return bool(live.spans)

    def empty(self) -> LoadedChunks:
        """See `LoadSource`."""
        return LoadedChunks(self._reuse.store)

    def order(self, live: RequestState) -> LoadOrder[LoadedChunks]:
        """See `LoadSource`."""
        request, store = live.request, self._reuse.store

        def size() -> int:
            return sum(store.size_of(span.end - span.begin) for span in live.spans if span.is_chunk)

        def load(loaded: LoadedChunks, going: Callable[[], bool]) -> None:
            self._reuse.load(live.numbers, live.spans, request.cache, request.cache_salt, loaded, going)

        return LoadOrder(size, load)

    def failed(self) -> None:
        """See `LoadSource`."""
        self._reuse.store.load_failed()
