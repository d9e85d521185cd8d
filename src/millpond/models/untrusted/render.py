"""Rendering of a chat by a tokenizer's template, a program of the model's that is ended if it does not end."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from millpond.errors import OptionError

#: Seconds of processor time for one chat: the longest take a tenth of one.
MAX_SECONDS = 5.0


class _TimeIsUp(Exception):
    """Exception raised in the thread of a template by its watcher."""


def write_chat(tokenizer: Any, messages: Sequence[Any], /, **how: Any) -> str:
    """Return the text that the chat template makes of messages.

    Args:
        tokenizer: Tokenizer with the template.
        messages: Messages of the chat.
        how: Arguments of `apply_chat_template`, and more for the template.

    Raises:
        OptionError: the template has not ended after `MAX_SECONDS`. Also what it raises of messages that it refuses.
    """
    try:
        with _limited(MAX_SECONDS):
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **how))
    except _TimeIsUp:
        raise OptionError(
            f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'this tokenizer'} has not ended after "
            f"{MAX_SECONDS:g} s; it is damaged or hostile: send the text itself, or take another template"
        ) from None


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_TimeIsUp` in this thread after so many seconds of computing.

    Waits in C are not interrupted.
    """
    thread, ended, lock = threading.get_ident(), threading.Event(), threading.Lock()
    clock = _clock_of(thread)
    begin, sent = clock(), False

    def watch() -> None:
        nonlocal sent
        remaining = seconds
        while not ended.wait(remaining):
            remaining = seconds - (clock() - begin)
            if remaining <= 0:
                with lock:
                    if not ended.is_set():
                        sent = True
                        _raise_in(thread, _TimeIsUp)
                return

    threading.Thread(target=watch, name="template-watch", daemon=True).start()
    arrived = False
    try:
        try:
            yield
        except _TimeIsUp:
            arrived = True
            raise
        finally:
            with lock:
                ended.set()
            if sent and not arrived:
                _take()
    except _TimeIsUp:  # it came behind the work, which has ended in time
        if arrived:
            raise


def _take() -> None:
    """Let an exception that was sent arrive, so that the interpreter keeps none to raise."""
    try:
        for _ in range(1000):
            time.sleep(0)
    except _TimeIsUp:
        pass


def _clock_of(thread: int) -> Any:
    """Return the processor time of a thread, or the wall clock if the platform has none."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    number = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(number)


def _raise_in(thread: int, error: type[Exception]) -> None:
    """Raise an error in another thread.

    Never call it without an error: that takes one back that has not arrived, and CPython then waits for it for ever,
    each thread looks for it at each turn of a loop, and one that is profiled stands still.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
