"""Mailbox: the newest output of a request for a task of an event loop, and how another thread fills many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from millpond.engine.outputs import RequestOutput
from millpond.errors import MillpondError


class Mailbox:
    """The newest output of a request, for the task that reads it.

    Attributes:
        loop: of that task. finished: whether it has read the last one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.finished = False
        self.loop = loop
        self._there = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Called by the engine's thread: no output comes any more."""

        def arrive() -> None:
            self._error = error
            self._there.set()

        self._post(arrive)

    def end(self) -> None:
        """Called by the engine's thread: no output comes any more, and that is no error."""

        def arrive() -> None:
            self.finished, self._output = True, None
            self._there.set()

        self._post(arrive)

    def _post(self, arrive: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(arrive)

    async def next(self) -> RequestOutput | None:
        """The newest output that was not read yet; None: the stream has ended without one.

        Raises:
            MillpondError: none comes any more.
        """
        await self._there.wait()
        self._there.clear()
        if self._error is not None:
            raise self._error
        if self._output is not None:
            self.finished = self._output.finished
        return self._output

    async def last(self) -> RequestOutput:
        """The output that the request ended with.

        Raises:
            MillpondError: none comes any more.
        """
        while (output := await self.next()) is not None:
            if output.finished:
                return output
        raise MillpondError("the request was given to another engine, and ends there")

    def arrive(self, output: RequestOutput) -> None:
        """Called in the reader's loop; see `deliver`."""
        self._output = output
        self._there.set()


#: Outputs, each with the mailbox that it is for.
Mail = tuple[Mailbox, RequestOutput]


def deliver(mail: Iterable[Mail]) -> list[Mail]:
    """Put outputs into mailboxes, from another thread: each loop is called once, whatever the number.

    Its tasks then continue in one pass of the loop. To wake it for each output costs the caller a change of threads
    each time, and lets tasks go on while others still wait for outputs of the same step.

    Returns:
        Those whose readers are gone, with their loops.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[Mail]] = {}
    for mailbox, output in mail:
        by_loop.setdefault(mailbox.loop, []).append((mailbox, output))
    gone: list[Mail] = []
    for loop, found in by_loop.items():
        try:
            loop.call_soon_threadsafe(_fill, found)
        except RuntimeError:  # the loop is closed
            gone += found
    return gone


def _fill(mail: Sequence[Mail]) -> None:
    for mailbox, output in mail:
        mailbox.arrive(output)
