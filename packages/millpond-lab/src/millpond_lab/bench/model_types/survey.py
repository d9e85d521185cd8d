"""All types, one after another, each in a process of its own: a crash, a hang or a flood of memory ends that one."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from millpond_lab.bench.model_types.finding import BROKEN, Finding
from millpond_lab.bench.model_types.probe import probe

SECONDS, MEMORY_BYTES = 120.0, 8 << 30  #: what one type may take
_AHEAD = ["torch", "transformers", "transformers.generation", "millpond", "millpond_lab.bench.model_types.probe"]


def survey(kinds: Iterable[str], task: Callable[[str], Finding] = probe) -> Iterator[Finding]:
    """What comes of each type, in order."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(_AHEAD)
    for kind in kinds:
        ours, theirs = processes.Pipe(duplex=False)
        child = processes.Process(target=_child, args=(theirs, task, kind), daemon=True)
        child.start()
        theirs.close()
        yield _wait(kind, ours, child)


def _wait(kind: str, connection: Connection[Any, Any], child: Any) -> Finding:
    try:
        if not connection.poll(SECONDS):
            return Finding(kind, BROKEN, f"took longer than {SECONDS:.0f} seconds")
        found: Finding = connection.recv()
        return found
    except EOFError:
        child.join()
        return Finding(kind, BROKEN, f"its process ended with {child.exitcode}")
    finally:
        child.kill()
        child.join()
        connection.close()


def _child(connection: Connection[Any, Any], task: Callable[[str], Finding], kind: str) -> None:
    import torch

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    connection.send(task(kind))
    connection.close()
