"""Requests that wait for their chunks: the first ones of the queue are loaded, and begin when they are."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from millpond.engine.chunk_loader import ChunkLoader
from millpond.engine.chunk_reuse import ChunkReuse
from millpond.engine.loaded_chunks import LoadedChunks
from millpond.engine.request_state import RequestState
from millpond.engine.scheduler import State

#: Requests that are loaded before they can begin. More would find fewer of the chunks that those before them store.
AHEAD = 4
#: Seconds that a step waits for files where nothing else can run. Calls from other threads wait as long.
_WAIT_S = 0.02


class ChunkLoads:
    """Decides what is loaded, by numbers of the scheduler, and keeps a job from running until it is."""

    def __init__(self, reuse: ChunkReuse) -> None:
        self._reuse = reuse
        self._loader = ChunkLoader(reuse.store, reuse.store.loading)
        self._waiting: dict[str, RequestState] = {}  # not begun, the chosen ones among them
        self._chosen: dict[str, RequestState] = {}  # being loaded, or loaded

    @property
    def n_bytes(self) -> int:
        """Bytes of chunks in flight."""
        return self._loader.n_bytes

    def add(self, live: RequestState) -> None:
        """A request with chunks joined the queue; its job waits until they are loaded."""
        live.job.loading = True
        self._waiting[live.request.request_id] = live

    def advance(self) -> None:
        """Before a step: let jobs run whose chunks are loaded, and load those of the first in the queue."""
        if not self._waiting:
            return
        for name in heapq.nsmallest(AHEAD, self._waiting, key=lambda one: self._waiting[one].job.rank):
            if name not in self._chosen:
                self._choose(self._waiting[name])
            elif self._loader.is_blocked(name):
                self._make_way(self._waiting[name])
        for name, live in self._chosen.items():
            if live.job.loading and self._loader.is_loaded(name):
                live.job.loading = False

    def begin(self, live: RequestState) -> LoadedChunks:
        """What was loaded for a request that begins; its bytes count until it is released."""
        name = live.request.request_id
        del self._waiting[name], self._chosen[name]
        return self._loader.take(name)

    def forget(self, live: RequestState) -> None:
        """A request ends; one that has begun is no error."""
        name = live.request.request_id
        if self._waiting.pop(name, None) is not None:
            self._chosen.pop(name, None)
            self._loader.forget(name)

    def wait(self) -> None:
        """Nothing else can run: wait until something is loaded, for a moment."""
        if self._loader.pending:
            self._loader.wait(_WAIT_S)

    def close(self) -> None:
        """Stop loading."""
        self._loader.close()

    def _choose(self, live: RequestState) -> None:
        request = live.request
        self._chosen[request.request_id] = live
        most = sum(self._reuse.store.size_of(span.end - span.begin) for span in live.spans if span.is_chunk)

        def load(loaded: LoadedChunks, going: Callable[[], bool]) -> None:
            self._reuse.load(live.numbers, live.spans, request.cache, request.cache_salt, loaded, going)

        self._loader.add(request.request_id, load, most)

    def _make_way(self, first: RequestState) -> None:
        """Give back what was loaded for the last of those behind a request that finds no room for its own."""
        behind = [
            live for live in self._chosen.values()
            if live.job.state is State.WAITING and live.job.rank > first.job.rank and not live.job.loading
        ]  # fmt: skip
        last = max(behind, key=lambda live: live.job.rank, default=None)
        if last is not None:
            last.job.loading = True
            del self._chosen[last.request.request_id]
            self._loader.forget(last.request.request_id)
