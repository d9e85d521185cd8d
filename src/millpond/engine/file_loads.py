"""Requests that wait for files: the first ones of the queue are loaded, and begin after that."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

from millpond.engine.file_loader import FileLoader, Loaded, LoadOrder
from millpond.engine.request_state import RequestState
from millpond.engine.scheduler_request import RequestStatus

#: Seconds that a step waits for files where nothing else can run. Calls from other threads wait as long.
_WAIT_S = 0.02

T = TypeVar("T", bound=Loaded)


class LoadSource(Protocol[T]):
    """Files that requests wait for.

    Attributes:
        name: Name of the thread that loads.
        limit: Most bytes in flight, see `FileLoader`.
        ahead: Requests that are loaded before they can begin.
        patience_s: Seconds for which nothing may come from the disk; then requests that wait begin without files.
    """

    name: str
    limit: int
    ahead: int
    patience_s: float

    def wants(self, state: RequestState) -> bool:
        """Return whether something may be loaded for a request."""
        ...

    def empty(self) -> T:
        """Return an empty holder, to be filled for a request."""
        ...

    def order(self, state: RequestState) -> LoadOrder[T]:
        """Return the order for a request that is among the first."""
        ...

    def failed(self) -> None:
        """Record that something could not be loaded for an unforeseen reason."""
        ...

    def gave_up(self) -> None:
        """Record that a request begins without its files, since nothing came from the disk."""
        ...

    def disk_hangs(self, hangs: bool) -> None:
        """Record that the disk gives nothing, or that it does again."""
        ...


class FileLoads(Generic[T]):
    """Decides what is loaded, by the scheduler's numbers; a request waits until it is loaded.

    Args:
        source: Files to load.
    """

    def __init__(self, source: LoadSource[T]) -> None:
        self._source = source
        self._loader = FileLoader(source.name, source.limit, source.empty, source.failed)
        self._waiting: dict[str, RequestState] = {}  # not begun, the chosen ones among them
        self._chosen: dict[str, RequestState] = {}  # being loaded, or loaded
        self._put_back: dict[str, tuple[RequestState, T]] = {}  # had begun, and wait for the rest
        self._disk_hangs = False

    @property
    def n_bytes(self) -> int:
        """Bytes in flight."""
        return self._loader.n_bytes

    def add(self, state: RequestState) -> None:
        """Let a request that joined the queue wait until its files are loaded."""
        if self._source.wants(state):
            state.scheduled.is_loading = True
            self._waiting[state.request.request_id] = state

    def advance(self) -> None:
        """Let requests run whose files are loaded, and load those of the first in the queue.

        Called before a step.
        """
        if self._disk_hangs != (hangs := self._loader.stuck_s > self._source.patience_s):
            self._disk_hangs = hangs
            self._source.disk_hangs(hangs)
        if not self._waiting and not self._put_back:
            return
        for name in heapq.nsmallest(
            self._source.ahead, self._waiting, key=lambda key: self._waiting[key].scheduled.queue_key
        ):
            if name not in self._chosen:
                self._choose(self._waiting[name])
            elif self._loader.is_blocked(name):
                self._unload_last(self._waiting[name])
        for name, state in self._chosen.items():
            if hangs and state.scheduled.is_loading and not self._loader.is_loaded(name):
                self._loader.replace_by_empty(name)
                self._source.gave_up()
            if state.scheduled.is_loading and self._loader.is_loaded(name):
                state.scheduled.is_loading = False
        for name, (state, loaded) in self._put_back.items():
            if hangs and self._loader.is_loading(name, loaded):
                self._put_back[name] = state, self._loader.replace_by_empty(name)
                self._source.gave_up()
            if not self._loader.is_loading(name, self._put_back[name][1]):
                state.scheduled.is_loading = False

    def begin(self, state: RequestState) -> T | None:
        """Return what was loaded for a request that begins; None: it never waited.

        Its bytes count until it is released.
        """
        name = state.request.request_id
        if name in self._put_back:
            return self._put_back.pop(name)[1]
        if self._waiting.pop(name, None) is None:
            return None
        del self._chosen[name]
        return self._loader.take(name)

    def put_back(self, state: RequestState, loaded: T) -> None:
        """Let a request that had begun wait until nothing more is read for it; it begins again with the same."""
        state.scheduled.is_loading = True
        self._put_back[state.request.request_id] = state, loaded

    def forget(self, state: RequestState) -> None:
        """Drop a request that ends or needs no file; one that has begun is no error."""
        name = state.request.request_id
        if self._put_back.pop(name, None) is not None:
            self._loader.forget(name)
        if self._waiting.pop(name, None) is not None:
            self._chosen.pop(name, None)
            self._loader.forget(name)

    def wait(self) -> None:
        """Wait until something is loaded, for a moment: nothing else can run."""
        if self._loader.pending:
            self._loader.wait(_WAIT_S)

    def close(self) -> None:
        """Stop loading."""
        self._loader.close()

    def _choose(self, state: RequestState) -> None:
        name = state.request.request_id
        self._chosen[name] = state
        self._loader.add(name, self._source.order(state))

    def _unload_last(self, first: RequestState) -> None:
        """Release the files of the last request after `first`, which has no memory for its own."""
        later = [
            state
            for state in self._chosen.values()
            if state.scheduled.status is RequestStatus.WAITING
            and state.scheduled.queue_key > first.scheduled.queue_key
            and not state.scheduled.is_loading
        ]
        last = max(later, key=lambda state: state.scheduled.queue_key, default=None)
        if last is not None:
            last.scheduled.is_loading = True
            del self._chosen[last.request.request_id]
            self._loader.forget(last.request.request_id)
