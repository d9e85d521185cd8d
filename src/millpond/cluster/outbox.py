"""Outbox: outputs that requests of a cluster have in one pass of its loop, sent to their readers together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millpond.engine.mailbox import Mail, Mailbox, deliver
from millpond.engine.outputs import RequestOutput


class Outbox:
    """Outputs for tasks of other event loops; a report of a worker has those of all its requests.

    Args:
        cancel: called with the id of a request whose reader is gone, with its loop.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._mail: list[Mail] = []

    def put(self, box: Mailbox, output: RequestOutput) -> None:
        """Send an output at the end of this pass of the loop that is running."""
        if not self._mail:
            asyncio.get_running_loop().call_soon(self._send)
        self._mail.append((box, output))

    def _send(self) -> None:
        mail, self._mail = self._mail, []
        for _, output in deliver(mail):
            if not output.finished:
                self._cancel(output.request_id)
