"""`millpond serve`: an OpenAI-compatible server for one model, and a page that shows its KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from millpond.cli.cache_options import CacheChoice
from millpond.cli.console import errors
from millpond.cli.model_options import device_of_engine
from millpond.cli.option_groups import expand_groups
from millpond.cli.options import DeviceMemory, DeviceName, Disk, DtypeName, Memory, ModelName, Threads, optional
from millpond.cli.serve_options import Access, EngineChoice, RequestLimits, Workers
from millpond.cli.serve_summary import show_requests, summary
from millpond.errors import OptionError
from millpond.install_command import install_command

if TYPE_CHECKING:
    from millpond.server.llm_protocol import ServedLLM


@expand_groups
def serve(
    *,
    model: ModelName = "pond-recall",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_name: Annotated[str | None, optional(help="The model's name for clients. Default: as --model.")] = None,
    cache: CacheChoice,
    engine: EngineChoice,
    memory: Memory = None,
    disk: Disk = None,
    device: DeviceName = None,
    device_memory: DeviceMemory = None,
    dtype: DtypeName = "auto",
    threads: Threads = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes calls of tools: hermes, llama3, mistral, auto (as its chat template does), "
            "or none (calls stay in the text)."
        ),
    ] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="No line per request.")] = False,
    workers: Workers,
    limits: RequestLimits,
    access: Access,
) -> None:
    """Serve a model over OpenAI's HTTP API inside a memory limit; http://HOST:PORT/ is a page to chat on."""
    try:
        from millpond.server.settings import ServerSettings
        from millpond.server.uvicorn_server import run
    except ModuleNotFoundError as error:
        raise OptionError(f"the server needs {error.name}: {install_command('server')}") from error
    from millpond.engine.async_llm import AsyncLLM
    from millpond.engine.config import EngineConfig

    settings = ServerSettings(**limits.as_settings(), **access.as_settings(), tool_parser=tool_parser)
    config = EngineConfig(**cache.for_request(), calibration=cache.calibration, **engine.as_arguments())
    name, kind, layout = (
        served_name or name_of(model),
        None if dtype == "auto" else dtype,
        workers.as_arguments(threads),
    )
    llm: ServedLLM
    if workers.several:
        from millpond.cluster.async_llm import AsyncClusterLLM

        if device is not None or device_memory is not None:
            raise OptionError("workers compute on a CPU: leave --device and --device-memory out with workers")
        if memory is not None or disk is not None or config.chunk_store is not None or config.cache_dir is not None:
            raise OptionError(
                "--memory, --disk, --chunk-store and --cache-dir are those of one engine: leave them out with workers"
            )
        llm = AsyncClusterLLM(model, config, model_name=name, dtype=kind, threads=threads, **layout)
    else:
        llm = AsyncLLM(
            model,
            config,
            model_name=name,
            dtype=kind,
            threads=threads,
            memory=memory,
            disk=disk,
            device=device_of_engine(device, disk, config.weights, memory),
            device_memory=device_memory,
        )
    if not settings.api_keys and host not in ("127.0.0.1", "localhost", "::1"):
        errors().print(
            f"[yellow]note:[/] anyone who can reach {escape(host)} may use the model; --api-key limits that to holders "
            "of a key"
        )
    if not quiet:
        show_requests()

    def told(port: int) -> None:
        for line in summary(llm, settings, host, port):
            errors().print(escape(line), soft_wrap=True, highlight=False)

    run(llm, settings, host=host, port=port, listens=told)


def name_of(model: str) -> str:
    """A model's name for clients: a hub id or a name as it is, a folder by its last part, a GGUF file by its stem.

    Example:
        >>> name_of("pond-recall")
        'pond-recall'
    """
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else model
