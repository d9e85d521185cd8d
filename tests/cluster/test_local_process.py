"""Processes that are ended by their handles: frozen ones at once, and no other of the same number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from millpond.cluster.ray_worker import LocalProcess, RayWorker

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no handles of processes")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_process_ends_at_once(child: subprocess.Popen[bytes], frozen: bool) -> None:
    process = LocalProcess(child.pid)
    if frozen:
        os.kill(child.pid, signal.SIGSTOP)
    process.kill()
    assert child.wait(2) == -signal.SIGKILL
    process.kill()  # and no error


def test_one_that_has_ended_is_no_error(child: subprocess.Popen[bytes]) -> None:
    before = LocalProcess(child.pid)
    child.kill()
    child.wait()
    handles = psutil.Process().num_fds()
    before.kill()
    LocalProcess(child.pid).kill()
    assert psutil.Process().num_fds() == handles - 1


def test_a_worker_is_ended_though_ray_waits_for_it(child: subprocess.Popen[bytes]) -> None:
    worker: Any = RayWorker.__new__(RayWorker)
    asked: list[object] = []
    worker._ray, worker._actor = SimpleNamespace(kill=asked.append), "the actor"
    worker._process = LocalProcess(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    worker.kill()
    assert asked == ["the actor"]
    assert child.wait(2) == -signal.SIGKILL
    worker._process = None  # of another machine
    worker.kill()
    assert len(asked) == 2
