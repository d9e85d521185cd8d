"""The app in uvicorn, with a shutdown that loses no answer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from millpond.server.admission import LEAVE_S
from millpond.server.app import create_app
from millpond.server.connection_limits import Connections
from millpond.server.llm_protocol import ServedLLM
from millpond.server.service import Service
from millpond.server.settings import ServerSettings

#: Seconds that one thread may run Python while another wants to. The engine's does at every operation of a step, and
#: would wait so long each time while a body is read or a text written.
_TURN_S = 2e-4


class DrainingServer(uvicorn.Server):
    """At the first signal new requests are refused; running ones finish or return what they have.

    It ends within `drain_s` + 5 seconds, whatever the engine does. The second Ctrl-C ends the process at once.

    Args:
        listens: called with its port once it takes connections.
    """

    def __init__(self, config: uvicorn.Config, service: Service, listens: Callable[[int], None] | None = None) -> None:
        super().__init__(config)
        self._service = service
        self._listens = listens
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What uvicorn calls at a signal."""
        self._service.gate.draining = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Listen, and tell."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self._listens is not None:
            self._listens(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """End what runs while uvicorn waits for the connections."""
        self._drain = asyncio.create_task(self._service.gate.drain(self._service.settings.drain_s))
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
    """Serve until a signal comes. Python's threads take turns quickly from then on.

    Args:
        listens: called with the port once the server takes connections.
    """
    sys.setswitchinterval(_TURN_S)
    server_of(llm, settings or ServerSettings(), host, port, listens).run()


def server_of(
    llm: ServedLLM, settings: ServerSettings, host: str, port: int, listens: Callable[[int], None] | None = None
) -> DrainingServer:
    """A server that is ready to run; `listens` as `run` has it."""
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
