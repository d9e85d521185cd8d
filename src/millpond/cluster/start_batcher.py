"""StartBatcher: requests for workers, as few messages as their answers allow."""

from __future__ import annotations

from millpond.cluster.event_loop import BackgroundTasks, quietly
from millpond.cluster.handle import WorkerHandle, WorkerLostError
from millpond.cluster.messages import StartMessage


class StartBatcher:
    """Requests for workers.

    Those that are sent in one pass of the loop go in one message, and so do those that come until a worker has
    answered the message before; nothing waits for a clock.

    Args:
        tasks: Tasks in the background.
    """

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        #: Requests that are in no message yet, by name, of each worker that has a message to answer or gets one.
        self._waiting: dict[WorkerHandle, dict[str, StartMessage]] = {}

    def send(self, handle: WorkerHandle, start: StartMessage) -> None:
        """Let a worker have a request."""
        if handle not in self._waiting:
            self._waiting[handle] = {}
            self._tasks.run(self._run(handle, self._waiting[handle]))
        self._waiting[handle][start.request.request_id] = start

    def cancel(self, handle: WorkerHandle, name: str) -> None:
        """Let a worker end a request; one that is in no message yet is not sent at all."""
        if self._waiting.get(handle, {}).pop(name, None) is None:
            self._tasks.run(quietly(handle.cancel(name)))

    async def _run(self, handle: WorkerHandle, waiting: dict[str, StartMessage]) -> None:
        try:
            while waiting:
                starts = tuple(waiting.values())
                waiting.clear()
                await handle.start(starts)
        except WorkerLostError:
            return  # its reports end too, and then its requests go to others
        finally:
            del self._waiting[handle]
