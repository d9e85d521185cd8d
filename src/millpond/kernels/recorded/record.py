"""Recording of work on a GPU as a CUDA graph, which does it again."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch

from millpond.errors import OptionError


class GraphRecorder(Protocol):
    """What records work."""

    def __call__(self, work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """What does the same again with the tensors that `work` reads and writes; it is run once before."""
        ...


def recording() -> bool:
    """Whether decoding steps on a GPU are recorded as graphs: MILLPOND_CUDA_GRAPHS says, by default they are.

    Raises:
        OptionError: another value than 0 or 1.
    """
    said = os.environ.get("MILLPOND_CUDA_GRAPHS", "1")
    if said not in ("0", "1"):
        raise OptionError(f"MILLPOND_CUDA_GRAPHS={said!r}: use 1 to record decoding steps as CUDA graphs, or 0")
    return said == "1"


def record_cuda(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A CUDA graph of `work`, which is run once before, so that all kernels are compiled and loaded."""
    with torch.cuda.device(device):
        stream, anchor = _shared(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
            graph = _captured(work, anchor.pool())
        torch.cuda.current_stream().wait_stream(stream)
    replay: Callable[[], None] = graph.replay
    return replay


@cache
def _shared(device: int) -> tuple[Any, Any]:
    """The stream of all records on a device, and a graph that keeps their memory: what one needs in between, another
    may use too, since they never run at the same time.
    """
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = _captured(lambda: torch.zeros(1, device="cuda"), None)
    torch.cuda.current_stream().wait_stream(stream)
    return stream, graph


def _captured(work: Callable[[], object], pool: Any) -> Any:
    graph: Any = torch.cuda.CUDAGraph()
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph
