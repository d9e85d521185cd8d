"""Mailboxes: the newest output of a request for a task of an event loop, filled by another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from millpond.engine.outputs import RequestOutput
from millpond.errors import MillpondError


class Mailbox:
    """Newest output of a request, for the task that reads it.

    Args:
        loop: Event loop of that task.

    Attributes:
        loop: Event loop of that task.
        finished: Whether it has read the last output.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.finished = False
        self.loop = loop
        self._has_news = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """End the stream with an error; called by the engine's thread."""

        def arrive() -> None:
            self._error = error
            self._has_news.set()

        self._post(arrive)

    def end(self) -> None:
        """End the stream without an error; called by the engine's thread."""

        def arrive() -> None:
            self.finished, self._output = True, None
            self._has_news.set()

        self._post(arrive)

    def _post(self, arrive: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(arrive)

    async def next(self) -> RequestOutput | None:
        """Return the newest output that was not read yet; None: the stream has ended without one.

        Raises:
            MillpondError: no output comes any more.
        """
        await self._has_news.wait()
        self._has_news.clear()
        if self._error is not None:
            raise self._error
        if self._output is not None:
            self.finished = self._output.finished
        return self._output

    async def last(self) -> RequestOutput:
        """Return the output that the request ended with.

        Raises:
            MillpondError: no output comes any more.
        """
        while (output := await self.next()) is not None:
            if output.finished:
                return output
        raise MillpondError("the request was given to another engine, and ends there")

    def arrive(self, output: RequestOutput) -> None:
        """Take an output; called in the reader's loop, see `deliver`."""
        self._output = output
        self._has_news.set()


#: Outputs, each with the mailbox that it is for.
Mail = tuple[Mailbox, RequestOutput]


def deliver(mail: Iterable[Mail]) -> list[Mail]:
    """Put outputs into mailboxes, from another thread: each loop is called once per call.

    Its tasks then continue in one pass of the loop. To wake it for each output costs the caller a change of threads
    each time, and lets tasks continue while others still wait for outputs of the same step.

    Args:
        mail: Outputs, each with its mailbox.

    Returns:
        Outputs whose loops are closed, with their mailboxes.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[Mail]] = {}
    for mailbox, output in mail:
        by_loop.setdefault(mailbox.loop, []).append((mailbox, output))
    undeliverable: list[Mail] = []
    for loop, outputs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_fill, outputs)
        except RuntimeError:  # the loop is closed
            undeliverable += outputs
    return undeliverable


def _fill(mail: Sequence[Mail]) -> None:
    for mailbox, output in mail:
        mailbox.arrive(output)
