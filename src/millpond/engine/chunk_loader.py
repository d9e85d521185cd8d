"""Thread that reads and checks files of chunks for requests that wait, while others step on."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from millpond.cache.chunks.store import ChunkStore
from millpond.engine.loaded_chunks import LoadedChunks

_log = logging.getLogger(__name__)

#: load(loaded, going): fill `loaded`, and stop early where not `going()`.
Load = Callable[[LoadedChunks, Callable[[], bool]], None]


@dataclass(frozen=True, slots=True)
class _Order:
    """What is to be loaded for a request: by `load`, of at most `n_bytes`."""

    load: Load
    n_bytes: int


class ChunkLoader:
    """Loads for one request after another; methods are called by one other thread.

    Args:
        store: that the chunks are of. limit: most bytes that are loaded and not released. One request that needs more
            is loaded while no other holds any.
    """

    def __init__(self, store: ChunkStore, limit: int) -> None:
        self._store, self._limit = store, limit
        self._changed = threading.Condition()
        self._orders: OrderedDict[str, _Order] = OrderedDict()
        self._charged: dict[str, int] = {}  # bytes by request, from the begin of its loading to its release
        self._loaded: dict[str, LoadedChunks] = {}
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def n_bytes(self) -> int:
        """Bytes in flight: as they were counted on beforehand for the request that is being loaded."""
        with self._changed:
            return sum(self._charged.values())

    @property
    def pending(self) -> bool:
        """Whether something is to be loaded."""
        with self._changed:
            return bool(self._orders) or len(self._charged) > len(self._loaded)

    def add(self, name: str, load: Load, n_bytes: int) -> None:
        """Load for a request, after those before it; n_bytes: that may take, at most."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="millpond-chunks", daemon=True)
                self._thread.start()
            self._orders[name] = _Order(load, n_bytes)
            self._changed.notify_all()

    def is_loaded(self, name: str) -> bool:
        """Whether all was loaded for a request."""
        with self._changed:
            return name in self._loaded

    def is_blocked(self, name: str) -> bool:
        """Whether a request is not loaded because others hold too many bytes."""
        with self._changed:
            return name in self._orders and not self._may_load(self._orders[name])

    def take(self, name: str) -> LoadedChunks:
        """What was loaded for a request. Its bytes count until it is released."""
        with self._changed:
            return self._loaded[name]

    def forget(self, name: str) -> None:
        """Stop loading for a request and release what it has; one that is not known is no error."""
        with self._changed:
            self._orders.pop(name, None)
            loaded = self._loaded.get(name)
            if loaded is None:
                self._charged.pop(name, None)
            self._changed.notify_all()
        if loaded is not None:
            loaded.release()

    def wait(self, seconds: float) -> None:
        """Wait until something was loaded, if something is being loaded; `seconds` at most."""
        with self._changed:
            known = len(self._loaded)

            def changed() -> bool:
                return len(self._loaded) > known or not (self._orders or self._going())

            self._changed.wait_for(changed, seconds)

    def close(self) -> None:
        """Stop, and release what is loaded."""
        with self._changed:
            self._closing = True
            self._orders.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for name in list(self._loaded):
            self.forget(name)

    # ------------------------------------------------------------------ the thread

    def _going(self) -> bool:
        return len(self._charged) > len(self._loaded)

    def _may_load(self, order: _Order) -> bool:
        return not self._charged or sum(self._charged.values()) + order.n_bytes <= self._limit

    def _next(self) -> tuple[str, _Order] | None:
        """Wait for the next order; None: it is time to stop."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or (bool(self._orders) and self._may_load(next(iter(self._orders.values()))))
            )
            if self._closing:
                return None
            name, order = self._orders.popitem(last=False)
            self._charged[name] = order.n_bytes
            return name, order

    def _serve(self) -> None:
        while (found := self._next()) is not None:
            name, order = found
            loaded = LoadedChunks(self._store)
            try:
                order.load(loaded, partial(self._is_wanted, name))
            except Exception as error:  # the chunks are computed instead; no request fails
                _log.error("chunks could not be loaded", exc_info=error)
                self._store.load_failed()
            with self._changed:
                wanted = self._is_wanted(name)
                if wanted:
                    self._charged[name] = loaded.nbytes
                    self._loaded[name] = loaded
                    loaded.on_release = partial(self._released, name)
                self._changed.notify_all()
            if not wanted:
                loaded.release()

    def _is_wanted(self, name: str) -> bool:
        return name in self._charged and not self._closing

    def _released(self, name: str) -> None:
        with self._changed:
            self._loaded.pop(name, None)
            self._charged.pop(name, None)
            self._changed.notify_all()
