"""Threads of the native kernels: the runtime's and the pool's give the same bits, also at once and after a fork."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from millpond.kernels.native import library

pytestmark = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")

PROGRAM = """
import hashlib, os, sys, threading, torch
from millpond.kernels import native
from millpond.kernels.native import library

torch.set_num_threads(4)
g = torch.Generator().manual_seed(0)
x, w = torch.randn(3, 512, generator=g), torch.randn(4096, 512, generator=g)

def digest():
    return hashlib.sha256(native.linear(x, w, None).numpy().tobytes()).hexdigest()

wanted = digest()
found = []
def many():
    for _ in range(200):
        found.append(digest() == wanted)
threads = [threading.Thread(target=many) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 2400 and all(found)
if sys.argv[1] == "pool":
    child = os.fork()
    if child == 0:
        os._exit(0 if digest() == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0, "a forked child has threads of its own"
assert digest() == wanted
for most in (1, 2, 3, 64):
    library.load()[1].mp_limit_threads(most)
    assert digest() == wanted, f"{most} CPUs"
print(wanted)
"""
FEWER = """
import os, torch
from millpond.kernels import native
from millpond.kernels.native import library

torch.set_num_threads(4)
x, w = torch.randn(3, 512), torch.randn(4096, 512)

def started(most):
    library.load()[1].mp_limit_threads(most)
    before = len(os.listdir("/proc/self/task"))
    native.linear(x, w, None)
    return len(os.listdir("/proc/self/task")) - before

print([started(most) for most in (1, 2, 3, 64)])
"""


def bits(threads: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, threads],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"MILLPOND_THREADS": threads},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_both_kinds_of_threads_give_the_same_bits() -> None:
    """From twelve threads at once, more than the pool has slots, where each call shares its work."""
    assert bits("pool") == bits("openmp") == bits("auto")


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of a process in /proc")
def test_no_more_threads_than_cpus() -> None:
    """A loop for 4 threads starts none beside its caller on 1 CPU, one on 2, two on 3, and no more than 3 on many."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FEWER],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"MILLPOND_THREADS": "pool"},
    )
    assert done.stdout == "[0, 1, 1, 1]\n", done.stdout + done.stderr
