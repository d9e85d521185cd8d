"""Threads that find, read and check files for requests that wait, while others step on."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

_log = logging.getLogger(__name__)


class Loaded(Protocol):
    """What was read for one request, until it is released.

    Attributes:
        on_release: called once, by `release`.
    """

    on_release: Callable[[], None] | None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        ...

    def release(self) -> None:
        """The request needs it no longer; a second call does nothing."""
        ...


T = TypeVar("T", bound=Loaded)


@dataclass(slots=True)
class LoadOrder(Generic[T]):
    """What is to be loaded for a request. Both are called in threads of the loader, `size` first.

    Attributes:
        size: the most bytes that it may take; with 0 there is nothing to load. load: load(loaded, going): fill
            `loaded`, and stop early where not `going()`.
        n_bytes: what `size` said.
    """

    size: Callable[[], int]
    load: Callable[[T, Callable[[], bool]], None]
    n_bytes: int = 0


class FileLoader(Generic[T]):
    """Loads for one request after another; methods are called by one other thread.

    A thread of its own finds out how much there is to load, so that those for whom there is nothing wait for no file.

    Args:
        name: of the thread that reads. limit: most bytes that are loaded and not released. One request that needs more
            is loaded while no other holds any.
        empty: makes what is filled for a request. failed: is called where that failed for an unforeseen reason.
    """

    def __init__(self, name: str, limit: int, empty: Callable[[], T], failed: Callable[[], None]) -> None:
        self._name, self._limit, self._empty, self._failed = name, limit, empty, failed
        self._changed = threading.Condition()
        self._unsized: OrderedDict[str, LoadOrder[T]] = OrderedDict()
        self._orders: OrderedDict[str, LoadOrder[T]] = OrderedDict()
        self._charged: dict[str, int] = {}  # bytes by request, from the begin of its loading to its release
        self._loaded: dict[str, T] = {}
        self._threads: list[threading.Thread] = []
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
            return self._going()

    def add(self, name: str, order: LoadOrder[T]) -> None:
        """Load for a request, after those before it."""
        with self._changed:
            if not self._threads:
                for kind, serve in ((self._name, self._serve), (f"{self._name}-sizes", self._serve_sizes)):
                    self._threads.append(threading.Thread(target=serve, name=kind, daemon=True))
                    self._threads[-1].start()
            self._unsized[name] = order
            self._changed.notify_all()

    def is_loaded(self, name: str) -> bool:
        """Whether all was loaded for a request."""
        with self._changed:
            return name in self._loaded

    def is_blocked(self, name: str) -> bool:
        """Whether a request is not loaded because others hold too many bytes."""
        with self._changed:
            order = self._orders.get(name)
            return order is not None and not self._may_load(order)

    def take(self, name: str) -> T:
        """What was loaded for a request. Its bytes count until it is released."""
        with self._changed:
            return self._loaded[name]

    def forget(self, name: str) -> None:
        """Stop loading for a request and release what it has; one that is not known is no error."""
        with self._changed:
            self._unsized.pop(name, None)
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
                return len(self._loaded) > known or not self._going()

            self._changed.wait_for(changed, seconds)

    def close(self) -> None:
        """Stop, and release what is loaded."""
        with self._changed:
            self._closing = True
            self._unsized.clear()
            self._orders.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for name in list(self._loaded):
            self.forget(name)

    # ------------------------------------------------------------------ the threads

    def _going(self) -> bool:
        return bool(self._unsized or self._orders) or len(self._charged) > len(self._loaded)

    def _may_load(self, order: LoadOrder[T]) -> bool:
        held = sum(self._charged.values())
        return not held or held + order.n_bytes <= self._limit

    def _serve_sizes(self) -> None:
        while (found := self._next_unsized()) is not None:
            name, order = found
            order.n_bytes = self._guarded(order.size) or 0
            with self._changed:
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
            return None if self._closing else next(iter(self._unsized.items()))

    def _next(self) -> tuple[str, LoadOrder[T]] | None:
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

    def _finish(self, name: str, loaded: T) -> None:
        self._charged[name] = loaded.nbytes
        self._loaded[name] = loaded
        loaded.on_release = partial(self._released, name)

    def _guarded(self, call: Callable[[], int | None]) -> int | None:
        """What a call returns; None where it fails: the prompt is then computed, and no request fails."""
        try:
            return call()
        except Exception as error:
            _log.error("files could not be loaded", exc_info=error)
            self._failed()
            return None

    def _serve(self) -> None:
        while (found := self._next()) is not None:
            name, order = found
            loaded = self._empty()
            self._guarded(partial(order.load, loaded, partial(self._is_wanted, name)))
            with self._changed:
                wanted = self._is_wanted(name)
                if wanted:
                    self._finish(name, loaded)
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
