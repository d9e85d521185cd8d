"""Thread counts: of the native kernels, and of torch's own loops around them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class _Local(threading.local):
    count = 0  #: of native kernels on this thread; 0: as many as torch


_local = _Local()


def thread_count() -> int:
    """Threads for a native kernel that this thread calls: torch's, those before `torch_on_one_thread` inside it."""
    return _local.count or torch.get_num_threads()


@cache
def _set_openmp() -> ctypes._NamedFuncPointer | None:
    """omp_set_num_threads of the runtime that torch has loaded; None where its symbols cannot be seen."""
    try:
        return ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError):
        return None


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Torch's loops that this thread starts run on it alone; native kernels keep their threads.

    A loop of OpenMP ends when all of its threads have come to the end, milliseconds later where one has lost its core
    to another process. Between native kernels, whose threads do not wait like that, torch's loops are small. Only the
    calling thread is concerned, not the process as with `torch.set_num_threads`. Inside another one it does nothing.
    """
    before, set_openmp = torch.get_num_threads(), _set_openmp()
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
def torch_on_all_threads() -> Iterator[None]:
    """Inside `torch_on_one_thread`: a large computation of torch's own has the threads of before."""
    count, set_openmp = _local.count, _set_openmp()
    if not count or set_openmp is None:
        yield
        return
    set_openmp(count)
    try:
        yield
    finally:
        set_openmp(1)
