"""Thread counts: of the native kernels, and of torch's own loops around them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")

#: omp_pause_soft: what the program set stays as it is.
_SOFT = 1


class _Local(threading.local):
    count = 0  #: of native kernels on this thread; 0: as many as torch


_local = _Local()


def thread_count() -> int:
    """Return the threads for a native kernel that this thread calls.

    They are torch's, those before `torch_on_one_thread` inside it.
    """
    return _local.count or torch.get_num_threads()


@cache
def _openmp(name: str) -> ctypes._NamedFuncPointer | None:
    """Return a function of the OpenMP runtime that torch has loaded, or None.

    None also if its symbols cannot be seen.
    """
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):
        return None


def end_own_threads() -> None:
    """End the threads that OpenMP keeps for loops of this thread; its next loop starts others.

    Each thread that has run a loop keeps helpers. With those of two such threads there are more than CPUs, and then
    OpenMP lets helpers sleep as soon as they wait, also those that are in use: on two CPUs a short prompt took half as
    long again. So a thread whose work goes on in another one ends its own.
    """
    pause = _openmp("omp_pause_resource_all")
    if pause is not None:
        pause(_SOFT)


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Run torch's loops of this thread on it alone; native kernels keep their threads.

    A loop of OpenMP ends when all of its threads have come to the end, milliseconds later where one has lost its core
    to another process. Between native kernels, whose threads do not wait like that, torch's loops are small. Only the
    calling thread is concerned, not the process as with `torch.set_num_threads`. Inside another one it does nothing.
    """
    before, set_openmp = torch.get_num_threads(), _openmp("omp_set_num_threads")
    if before == 1 or _local.count or set_openmp is None:
        yield
        return
    _local.count = before
    set_openmp(1)
    try:
        yield
    finally:
        set_openmp(before)
        _local.count = 0


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Run torch's loops and native kernels of this thread on it alone: others have the cores."""
    before, set_openmp = torch.get_num_threads(), _openmp("omp_set_num_threads")
    count, _local.count = _local.count, 1
    if set_openmp is not None:
        set_openmp(1)
    try:
        yield
    finally:
        if set_openmp is not None:
            set_openmp(before)
        _local.count = count


def alone(work: Callable[[], T]) -> T:
    """Return the result of some work without gradients, see `on_one_thread`."""
    with on_one_thread(), torch.no_grad():
        return work()


@contextmanager
def torch_on_all_threads() -> Iterator[None]:
    """Give torch all threads for a large computation inside `torch_on_one_thread`."""
    count, set_openmp = _local.count, _openmp("omp_set_num_threads")
    if not count or set_openmp is None:
        yield
        return
    set_openmp(count)
    try:
        yield
    finally:
        set_openmp(1)
