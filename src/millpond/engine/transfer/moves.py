"""Moves of requests: an engine gives them to another one, copies them, and takes in those of others."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

from millpond.engine.components import Components
from millpond.engine.request import Request
from millpond.engine.request_ends import RequestEnds
from millpond.engine.request_state import RequestState
from millpond.engine.request_table import RequestTable
from millpond.engine.transfer.request_transfer import Arrival, RequestTransfer
from millpond.errors import OptionError

#: Whether a request left an engine or was imported.
Direction = Literal["out", "in"]


class MovingRequests:
    """Part of an engine that moves requests.

    Attributes:
        on_transfer: Called when a request was exported or imported, with its direction, its name, the tokens of its
            prompt and the seconds; None: nothing is called.
    """

    _parts: Components
    _requests: RequestTable
    _ends: RequestEnds
    _transfer: RequestTransfer
    _changed_outside_step: list[RequestState]
    on_transfer: Callable[[Direction, str, int, float], None] | None = None

    def _take_stats(self) -> None:
        """Take note of the figures after a change."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Read the tokens that are pending, so that answers and caches belong together."""
        raise NotImplementedError

    def export_request(self, request_id: str) -> bytes:
        """End a request here, and return the bytes from which another engine continues it.

        See `import_request`. A request whose prompt is still being read is sent without its cache, and read again
        there. Pages are free afterwards.

        Args:
            request_id: Name of the request.

        Returns:
            One safetensors buffer with a checksum: request, tokens, seeds, entries. No pages, so that engines with
            pages of different sizes understand each other.

        Raises:
            OptionError: no such request, keys and values on a disk, or options of the method that name files. As after
                each of these errors, the request stays as it is.
            PoolFullError: it is swapped out and no memory is free to read its pages.
            DataError: the file of its pages is broken.
        """
        return self.begin_export(request_id).result()

    def begin_export(self, request_id: str) -> Future[bytes]:
        """End a request here as `export_request`, and return its bytes to come.

        With a storage codec they come from a thread beside the steps; the request has left at once.

        Args:
            request_id: Name of the request.

        Raises:
            OptionError, PoolFullError, DataError: see `export_request`.
        """
        began = time.perf_counter()
        self._settle()
        state = self._requests.get(request_id)
        if state is None or state.scheduled.is_shared_prefix:
            raise OptionError(f"no request {request_id!r} is in flight; it has ended, or was never added")
        data = self._transfer.to_bytes(state)
        self._ends.release_exported(state)
        self._changed_outside_step = [one for one in self._changed_outside_step if one is not state]
        if not self._requests:
            self._parts.trim()
        self._take_stats()
        if self.on_transfer is not None:
            self.on_transfer("out", request_id, state.scheduled.num_prompt_tokens, time.perf_counter() - began)
        return data

    def checkpoint(self, request_id: str) -> bytes | None:
        """Return a copy of a request that decodes, which also continues here.

        Args:
            request_id: Name of the request.

        Returns:
            As `export_request`; None: it is not in flight, its prompt is being read, or it is swapped out.

        Raises:
            OptionError: keys and values on a disk, or options of the method that name files.
        """
        copy = self.begin_checkpoint(request_id)
        return None if copy is None else copy.result()

    def begin_checkpoint(self, request_id: str) -> Future[bytes] | None:
        """Copy a request as `checkpoint`, and return its bytes to come, see `begin_export`.

        Args:
            request_id: Name of the request.

        Raises:
            OptionError: see `checkpoint`.
        """
        self._settle()
        state = self._requests.get(request_id)
        if (
            state is None
            or state.scheduled.is_shared_prefix
            or state.private_cache is not None
            or state.scheduled.num_computed_tokens < state.scheduled.num_prompt_tokens
        ):
            return None
        return self._transfer.to_bytes(state) if state.unfinished else None

    def read_request(self, data: bytes | bytearray | memoryview, request: Request | None = None) -> Arrival:
        """Read a request for `import_request`, codes decoded; safe to call from any thread.

        Args:
            data: See there.
            request: See there.

        Raises:
            DataError, CacheMismatchError: see there.
        """
        return self._transfer.read(data, request)

    def import_request(self, data: bytes | bytearray | memoryview | Arrival, request: Request | None = None) -> str:
        """Continue a request of another engine with the same model.

        It gets the tokens that it would have had there.

        Args:
            data: Bytes from `export_request` or from `checkpoint`; or what `read_request` made of them.
            request: The same request under its present name, with its deadline and the tokens that are known by now;
                those that came after the copy are fed and not drawn. None: as it was copied.

        Returns:
            Name of the request.

        Raises:
            DataError: bytes that are cut off or changed, or hold what no request has. As after each of these errors,
                nothing is left behind.
            CacheMismatchError: another model, or another method, budget, codec or calibration than here.
            PoolFullError: no memory is free now.
            OptionError, BudgetError, UnsupportedModelError: as `add`.
        """
        began = time.perf_counter()
        arrival = data if isinstance(data, Arrival) else self.read_request(data, request)
        state = self._transfer.restore(arrival)
        self._take_stats()
        if self.on_transfer is not None:
            self.on_transfer(
                "in", state.request.request_id, state.scheduled.num_prompt_tokens, time.perf_counter() - began
            )
        return state.request.request_id
