"""ReadGate: files are read while it is open, and never in the thread of the engine's steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class ReadGate:
    """Args: thread: name of the one that may read."""

    def __init__(self, thread: str) -> None:
        self._thread = thread
        self.open, self.reached = threading.Event(), threading.Event()

    def __call__(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(files: object, *args: Any) -> Any:
            assert threading.current_thread().name == self._thread, "a step reads no file"
            self.reached.set()
            assert self.open.wait(60)
            return read(files, *args)

        return guarded


@contextmanager
def read_gate(monkeypatch: pytest.MonkeyPatch, files: type, thread: str, method: str = "read") -> Iterator[ReadGate]:
    """A gate before a method of a class of files, which is opened in the end."""
    found = ReadGate(thread)
    monkeypatch.setattr(files, method, found(getattr(files, method)))
    yield found
    found.open.set()
