"""A server on a port of this machine, in a thread, for what needs a real connection."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from millpond.server.llm_protocol import ServedLLM
from millpond.server.settings import ServerSettings
from millpond.server.uvicorn_server import DrainingServer, server_of


class Live:
    """A running server.

    Attributes:
        url: of it. llm: what it serves. server: uvicorn's.
    """

    def __init__(self, make: Callable[[], ServedLLM], **settings: Any) -> None:
        self._make = make
        self._settings = ServerSettings(**{"drain_s": 5.0} | settings)
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._ready.wait(60), "the server did not start"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self.llm: Any = self._make()
        self.server: DrainingServer = server_of(self.llm, self._settings, "127.0.0.1", 0)
        self.loop = asyncio.get_running_loop()
        task = asyncio.create_task(self.server._serve())
        while not self.server.started and not task.done():
            await asyncio.sleep(0.005)
        if self.server.started:
            port = self.server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            self._ready.set()
        await task

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def soon(self, work: Callable[[], object]) -> None:
        """Do something in the server's thread."""
        self.loop.call_soon_threadsafe(work)

    def signal(self) -> None:
        """What SIGTERM does."""
        self.soon(lambda: self.server.handle_exit(15, None))

    def stop(self) -> None:
        self.signal()
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server hangs"


@contextmanager
def live(make: Callable[[], ServedLLM], **settings: Any) -> Iterator[Live]:
    server = Live(make, **settings)
    try:
        yield server
    finally:
        server.stop()


def until(true: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "never true"
        time.sleep(0.005)
