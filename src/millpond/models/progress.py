"""Progress of work on models that takes seconds: a spinner on a terminal, elsewhere plain lines, both on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Event, Thread

#: Seconds between two plain lines of one piece of work.
EVERY_S = 5.0


def tell(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(text: str, state: Callable[[], str] = str, every_s: float | None = None) -> Iterator[None]:
    """Show until the block ends that it goes on.

    Without a terminal, or without rich, a line is printed each `every_s` seconds: none for work that is done sooner.

    Args:
        state: how far it is, in words; "" where that is not known, and then the seconds are shown.
        every_s: None: `EVERY_S`.
    """
    over, begun = Event(), time.monotonic()
    if sys.stderr.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.markup import escape

        with (
            Console(stderr=True).status(escape(text)) as shown,
            _each(0.5, over, lambda: shown.update(escape(_line(text, state())))),
        ):
            yield
        return
    seconds = EVERY_S if every_s is None else every_s
    with _each(seconds, over, lambda: tell(_line(text, state() or f"{time.monotonic() - begun:.0f} s"))):
        yield


def _line(text: str, state: str) -> str:
    return f"{text}: {state}" if state else text


@contextmanager
def _each(seconds: float, over: Event, act: Callable[[], None]) -> Iterator[None]:
    """Within it, `act` is called from time to time."""

    def run() -> None:
        while not over.wait(seconds):
            act()

    thread = Thread(target=run, daemon=True, name="millpond-progress")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
