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
print(wanted)
"""


def bits(threads: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, threads], capture_output=True, text=True, timeout=120,
        env=os.environ | {"MILLPOND_THREADS": threads},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_kinds_of_threads_give_the_same_bits() -> None:
    """From twelve threads at once, more than the pool has slots, where each call shares its work."""
    assert bits("pool") == bits("openmp") == bits("auto")
