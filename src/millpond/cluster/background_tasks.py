"""BackgroundTasks: what a cluster does besides answering calls, and what happens when a part of it fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from millpond.errors import MillpondError

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Tasks of one event loop. failed: called with the error of one that should not have failed."""

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
