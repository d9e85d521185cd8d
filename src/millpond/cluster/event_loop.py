"""An event loop in a thread of its own, and the background tasks of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from millpond.errors import MillpondError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines and calls in one event loop until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it, from a thread that is not the loop's."""
        return self.start(work).result()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the loop."""

        async def work() -> T:
            return function()

        return self.start(work())

    def close(self) -> None:
        """Stop the loop; what still runs in it is cancelled."""

        async def cancel() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Tasks of one event loop.

    Args:
        failed: Called with the error of a task that should not have failed.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def cancel(self) -> None:
        """Cancel all of them, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("a task of the cluster ended with an error", exc_info=error)
            self._failed(error)


async def quietly(work: Coroutine[Any, Any, None]) -> None:
    """Wait for what need not succeed where a worker is gone."""
    with contextlib.suppress(MillpondError):
        await work
