"""`millpond-vllm serve`: vLLM's own server, whose requests evict."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from millpond_vllm import compat
from millpond_vllm.cli.engine_options import (
    Budget,
    Chunk,
    Force,
    Method,
    MethodOptions,
    Prefill,
    Recent,
    engine_settings,
)
from millpond_vllm.cli.model_name import with_model_folder
from millpond_vllm.cli.vllm_arguments import vllm_arguments
from millpond_vllm.event_times import CHUNK
from millpond_vllm.platform_classes import engine_arguments

_FILES = "PROMETHEUS_MULTIPROC_DIR"


def serve(
    context: typer.Context,
    method: Method = "snapkv",
    budget: Budget = "20%",
    recent: Recent = None,
    prefill: Prefill = "auto",
    chunk: Chunk = CHUNK,
    force: Force = False,
    option: MethodOptions = None,
) -> None:
    """Serve a model with vLLM, and evict from its KV cache.

    All other arguments go to `vllm serve` as they are: `vllm serve --help=all` lists them.
    """
    with _metrics_of_processes():  # before vLLM is imported, which looks for the folder then
        engine = engine_arguments(engine_settings(method, budget, recent, prefill, chunk, force, option))
        arguments = vllm_arguments(with_model_folder(context.args), engine)
        compat.check_version(force=force)
        compat.run_serve(arguments)


@contextmanager
def _metrics_of_processes() -> Iterator[None]:
    """Let `GET /metrics` show the counts of the engine's process: files in a folder carry them."""
    if os.environ.get(_FILES):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="millpond-vllm-metrics-") as folder:
        os.environ[_FILES] = folder
        try:
            yield
        finally:
            os.environ.pop(_FILES, None)
