"""The app in uvicorn, with limits of connections and a shutdown that loses no answer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from millpond.server.admission import LEAVE_S
from millpond.server.app import create_app
from millpond.server.llm_protocol import ServedLLM
from millpond.server.service import Service
from millpond.server.settings import ServerSettings

#: Bytes that are read of a connection at a time, so that none takes long, however small its pieces are.
_READ = 8 * 2**10
#: Checks of all connections per time limit.
_CHECKS = 4


class Connections:
    """All connections of a server.

    Attributes:
        closed: Connections that were closed because they kept the server waiting, or because there were too many.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.closed = 0
        self._settings = settings
        self._open: dict[Connection, None] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None

    def protocol(self, **of_uvicorn: Any) -> Connection:
        """Return the protocol that uvicorn uses for each connection."""
        return Connection(self, **of_uvicorn)

    def opened(self, connection: Connection) -> None:
        """Add a connection; where there are too many, one has to go."""
        self._open[connection] = None
        if len(self._open) > self._settings.max_connections:
            waiting = [other for other in self._open if other.waited_since is not None]
            self._close(min(waiting, key=lambda other: cast(float, other.waited_since)))
        if self._timer is None:
            self._plan()

    def lost(self, connection: Connection) -> None:
        """Forget a closed connection."""
        self._open.pop(connection, None)

    def _plan(self) -> None:
        limits = (self._settings.header_timeout_s, self._settings.write_timeout_s)
        self._timer = asyncio.get_running_loop().call_later(min(limits) / _CHECKS, self._check_all)

    def _check_all(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for connection in list(self._open):
            header, blocked = connection.header_since, connection.blocked_since
            if (header is not None and now - header > self._settings.header_timeout_s) or (
                blocked is not None and now - blocked > self._settings.write_timeout_s
            ):
                self._close(connection)
        if self._open:
            self._plan()

    def _close(self, connection: Connection) -> None:
        self.closed += 1
        self._open.pop(connection, None)
        connection.transport.abort()


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """One connection.

    Attributes:
        blocked_since: When its client stopped reading, on the loop's clock; None: it reads.
    """

    def __init__(self, owner: Connections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.blocked_since: float | None = None
        self._owner = owner
        self._idle_since = 0.0
        self._buffer = bytearray(_READ)

    @property
    def header_since(self) -> float | None:
        """Since when a whole header is awaited; None: there is one, and no answer yet."""
        return self._idle_since if self.cycle is None or self.cycle.response_complete else None

    @property
    def waited_since(self) -> float | None:
        """Since when the server waits for the client: for a header, a body or its reading; None: it does not."""
        if self.header_since is not None or (self.cycle.more_body and not self.cycle.response_started):
            return self._idle_since
        return self.blocked_since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; asyncio calls this first."""
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._owner.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End; asyncio calls this last."""
        self._owner.lost(self)
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return the buffer of the next bytes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Receive `nbytes` bytes."""
        self.data_received(bytes(self._buffer[:nbytes]))

    def on_response_complete(self) -> None:
        """Await the next header after an answer was sent."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Note that the client reads more slowly than it is written to."""
        self.blocked_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        self.blocked_since = None
        super().resume_writing()


#: Seconds that one thread may run Python while another wants to. The engine's does at every operation of a step, and
#: would wait so long each time while a body is read or a text written.
_TURN_S = 2e-4


class DrainingServer(uvicorn.Server):
    """Server that refuses new requests at the first signal and finishes the running ones.

    They finish or return what they have. It ends within `drain_s` + 5 seconds, whatever the engine does. The second
    Ctrl-C ends the process at once.

    Args:
        config: Configuration of uvicorn.
        service: The service.
        listens: Called with its port once it takes connections.
    """

    def __init__(self, config: uvicorn.Config, service: Service, listens: Callable[[int], None] | None = None) -> None:
        super().__init__(config)
        self._service = service
        self._listens = listens
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at a signal."""
        self._service.admission.draining = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Listen, and report the port."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self._listens is not None:
            self._listens(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """End what runs while uvicorn waits for the connections."""
        self._drain = asyncio.create_task(self._service.admission.drain(self._service.settings.drain_s))
        await super().shutdown(sockets)  # type: ignore[arg-type]
        await self._drain


def run(
    llm: ServedLLM,
    settings: ServerSettings | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    listens: Callable[[int], None] | None = None,
) -> None:
    """Serve until a signal comes; Python's threads take turns quickly from then on.

    Args:
        llm: The model.
        settings: Settings of the server; None: the defaults.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        listens: Called with the port once the server takes connections.
    """
    sys.setswitchinterval(_TURN_S)
    server_of(llm, settings or ServerSettings(), host, port, listens).run()


def server_of(
    llm: ServedLLM, settings: ServerSettings, host: str, port: int, listens: Callable[[int], None] | None = None
) -> DrainingServer:
    """Return a server that is ready to run; `listens` as `run` has it."""
    app = create_app(llm, settings)
    made: Any = Connections(settings).protocol  # uvicorn wants a class, and calls it
    graceful: Any = settings.drain_s + LEAVE_S  # a float serves, too
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="info",
        access_log=False,
        server_header=False,
        http=made,
        ws="none",
        timeout_graceful_shutdown=graceful,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
    )
    return DrainingServer(config, app.state.service, listens)
