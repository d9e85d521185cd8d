"""write_chat: a chat by a tokenizer's template, which is a program of the model's and is ended if it does not end."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from millpond.errors import OptionError

#: Seconds of processor time for one chat: the longest take a tenth of one.
MOST_SECONDS = 5.0


class _TimeIsUp(Exception):
    """Raised in the thread of a template by the one that watches it."""


def write_chat(tokenizer: Any, messages: Sequence[Any], /, **how: Any) -> str:
    """What the chat template makes of messages.

    Args:
        how: arguments of `apply_chat_template`, and what the template is given besides.

    Raises:
        OptionError: the template has not ended after `MOST_SECONDS`. Also what it raises of messages that it refuses.
    """
    try:
        with _limited(MOST_SECONDS):
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **how))
    except _TimeIsUp:
        raise OptionError(
            f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'this tokenizer'} has not ended after "
            f"{MOST_SECONDS:g} s; it is damaged or hostile: send the text itself, or take another template"
        ) from None


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_TimeIsUp` in this thread once it has computed for so long; what waits in C is not reached."""
    thread, ended, lock = threading.get_ident(), threading.Event(), threading.Lock()
    clock = _clock_of(thread)
    begin = clock()

    def watch() -> None:
        left = seconds
        while not ended.wait(left):
            left = seconds - (clock() - begin)
            if left <= 0:
                with lock:
                    if not ended.is_set():
                        _raise_in(thread, _TimeIsUp)
                return

    threading.Thread(target=watch, name="template-watch", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            ended.set()
            _raise_in(thread, None)  # one that has not arrived yet


def _clock_of(thread: int) -> Any:
    """The processor time of a thread; where the platform tells none, the clock on the wall."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    number = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(number)


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
