"""Threads that find, read and check files for requests that wait, while others step on."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

_log = logging.getLogger(__name__)
#: Seconds that closing waits for a thread that reads: where a disk gives nothing more, the thread never ends.
_CLOSE_S = 5.0


class Loaded(Protocol):
    """Contents of files read for one request, until they are released.

    Attributes:
        on_release: Called once, by `release`.
        on_ready: Called once at most, by what loads, where the request may begin before all is loaded.
    """

    on_release: Callable[[], None] | None
    on_ready: Callable[[], None] | None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        ...

    def release(self) -> None:
        """Release the contents: the request needs them no longer. A second call does nothing."""
        ...


T = TypeVar("T", bound=Loaded)


@dataclass(slots=True)
class LoadOrder(Generic[T]):
    """Files to load for a request.

    Both functions are called in threads of the loader, `size` first.

    Attributes:
        size: Returns the most bytes that it may take; with 0 there is nothing to load.
        load: load(loaded, is_wanted): fills `loaded`, and stops early where not `is_wanted()`.
        n_bytes: Result of `size`.
    """

    size: Callable[[], int]
    load: Callable[[T, Callable[[], bool]], None]
    n_bytes: int = 0


class FileLoader(Generic[T]):
    """Loads for one request after another; methods are called by one other thread.

    A thread of its own finds out how much there is to load, so that requests with nothing to load wait for no file.

    Args:
        name: Name of the thread that reads.
        limit: Most bytes that are loaded and not released. One request that needs more
            is loaded while no other holds any.
        empty: Makes the holder that is filled for a request.
        failed: Called where that failed for an unforeseen reason.
    """

    def __init__(self, name: str, limit: int, empty: Callable[[], T], failed: Callable[[], None]) -> None:
        self._name, self._limit, self._empty, self._failed = name, limit, empty, failed
        self._changed = threading.Condition()
        self._unsized: OrderedDict[str, LoadOrder[T]] = OrderedDict()
        self._orders: OrderedDict[str, LoadOrder[T]] = OrderedDict()
        self._charged: dict[str, int] = {}  # bytes by request, from the begin of its loading to its release
        self._loaded: dict[str, T] = {}
        self._loading: dict[str, T] = {}  # what the thread fills, as long as it is wanted
        self._busy_since: dict[str, float] = {}  # when each thread last got something from the disk, while it reads
        self._threads: list[threading.Thread] = []
        self._closing = False

    @property
    def n_bytes(self) -> int:
        """Bytes in flight; of the request that is being loaded, the bytes counted beforehand."""
        with self._changed:
            return sum(self._charged.values())

    @property
    def pending(self) -> bool:
        """Whether something is to be loaded."""
        with self._changed:
            return self._has_pending()

    def add(self, name: str, order: LoadOrder[T]) -> None:
        """Load for a request, after those before it."""
        with self._changed:
            if not self._threads:
                for thread_name, serve in ((self._name, self._serve), (f"{self._name}-sizes", self._serve_sizes)):
                    self._threads.append(threading.Thread(target=serve, name=thread_name, daemon=True))
                    self._threads[-1].start()
            self._unsized[name] = order
            self._changed.notify_all()

    @property
    def stuck_s(self) -> float:
        """Seconds for which something is being read and nothing has come; 0 where nothing is being read."""
        with self._changed:
            return max((time.monotonic() - since for since in self._busy_since.values()), default=0.0)

    def is_loading(self, name: str, loaded: T) -> bool:
        """Return whether more is being read for a request that has what was loaded first."""
        with self._changed:
            return self._loading.get(name) is loaded

    def replace_by_empty(self, name: str) -> T:
        """Stop loading for a request, release what it has, and return an empty holder, which is loaded."""
        with self._changed:
            loaded, empty = self._loaded.get(name), self._empty()
        if loaded is not None:
            loaded.release()
        with self._changed:
            self._unsized.pop(name, None)
            self._orders.pop(name, None)
            self._loading.pop(name, None)
            self._finish(name, empty)
            self._changed.notify_all()
        return empty

    def is_loaded(self, name: str) -> bool:
        """Return whether everything was loaded for a request."""
        with self._changed:
            return name in self._loaded

    def is_blocked(self, name: str) -> bool:
        """Return whether a request is not loaded because others hold too many bytes."""
        with self._changed:
            order = self._orders.get(name)
            return order is not None and not self._may_load(order)

    def take(self, name: str) -> T:
        """Return what was loaded for a request; its bytes count until it is released."""
        with self._changed:
            return self._loaded[name]

    def forget(self, name: str) -> None:
        """Stop loading for a request and release what it has; an unknown one is no error."""
        with self._changed:
            self._unsized.pop(name, None)
            self._orders.pop(name, None)
            self._loading.pop(name, None)
            loaded = self._loaded.get(name)
            if loaded is None:
                self._charged.pop(name, None)
            self._changed.notify_all()
        if loaded is not None:
            loaded.release()

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until something was loaded, if something is being loaded."""
        with self._changed:
            num_loaded = len(self._loaded)

            def changed() -> bool:
                return len(self._loaded) > num_loaded or not self._has_pending()

            self._changed.wait_for(changed, seconds)

    def close(self) -> None:
        """Stop, and release what is loaded."""
        with self._changed:
            self._closing = True
            self._unsized.clear()
            self._orders.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)
            if thread.is_alive():
                _log.warning("%s still waits for a disk, and ends with the process", thread.name)
        for name in list(self._loaded):
            self.forget(name)

    # ------------------------------------------------------------------ the threads

    def _has_pending(self) -> bool:
        return bool(self._unsized or self._orders or self._loading)

    def _may_load(self, order: LoadOrder[T]) -> bool:
        charged_bytes = sum(self._charged.values())
        return not charged_bytes or charged_bytes + order.n_bytes <= self._limit

    def _serve_sizes(self) -> None:
        while (entry := self._next_unsized()) is not None:
            name, order = entry
            order.n_bytes = self._guarded(order.size) or 0
            with self._changed:
                self._busy_since.pop("sizes", None)
                if self._unsized.get(name) is not order:  # it is not wanted any more
                    continue
                del self._unsized[name]
                if order.n_bytes:
                    self._orders[name] = order
                else:
                    self._finish(name, self._empty())
                self._changed.notify_all()

    def _next_unsized(self) -> tuple[str, LoadOrder[T]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._unsized)
            if self._closing:
                return None
            self._busy_since["sizes"] = time.monotonic()
            return next(iter(self._unsized.items()))

    def _next(self) -> tuple[str, LoadOrder[T], T] | None:
        """Wait for the next order and return it with the holder that it fills; None: it is time to stop."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or (bool(self._orders) and self._may_load(next(iter(self._orders.values()))))
            )
            if self._closing:
                return None
            name, order = self._orders.popitem(last=False)
            self._charged[name] = order.n_bytes
            self._loading[name] = loaded = self._empty()
            self._busy_since["reader"] = time.monotonic()
            return name, order, loaded

    def _finish(self, name: str, loaded: T) -> None:
        self._charged[name] = loaded.nbytes
        self._loaded[name] = loaded
        loaded.on_release = partial(self._released, name)

    def _guarded(self, call: Callable[[], int | None]) -> int | None:
        """Return the result of a call; None where it fails.

        The prompt is then computed, and no request fails.
        """
        try:
            return call()
        except Exception as error:
            _log.error("files could not be loaded", exc_info=error)
            self._failed()
            return None

    def _serve(self) -> None:
        while (entry := self._next()) is not None:
            name, order, loaded = entry
            loaded.on_ready = partial(self._make_ready, name, loaded)
            self._guarded(partial(order.load, loaded, partial(self._goes_on, name, loaded)))
            with self._changed:
                self._busy_since.pop("reader", None)
                is_wanted = self._is_wanted(name, loaded)
                if is_wanted and loaded.on_ready is not None:
                    self._finish(name, loaded)
                if is_wanted:
                    del self._loading[name]
                loaded.on_ready = None
                self._changed.notify_all()
            if not is_wanted:
                loaded.release()

    def _make_ready(self, name: str, loaded: T) -> None:
        """Let a request begin, though more is loaded for it."""
        with self._changed:
            if self._is_wanted(name, loaded):
                self._finish(name, loaded)
                loaded.on_ready = None
                self._changed.notify_all()

    def _goes_on(self, name: str, loaded: T) -> bool:
        """Note that something came from the disk, and return whether more is wanted."""
        with self._changed:
            self._busy_since["reader"] = time.monotonic()
            return self._is_wanted(name, loaded)

    def _is_wanted(self, name: str, loaded: T) -> bool:
        return self._loading.get(name) is loaded and not self._closing

    def _released(self, name: str) -> None:
        with self._changed:
            self._loaded.pop(name, None)
            self._charged.pop(name, None)
            self._loading.pop(name, None)
            self._changed.notify_all()
