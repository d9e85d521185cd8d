"""`millpond serve`: an OpenAI-compatible server for one model, and a page that shows its KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from millpond.cli.cache_options import CacheChoice
from millpond.cli.console import errors
from millpond.cli.option_groups import expand_groups
from millpond.cli.options import Disk, DtypeName, Memory, ModelName, Threads, optional
from millpond.cli.serve_options import Access, EngineChoice, RequestLimits
from millpond.errors import OptionError


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
    dtype: DtypeName = "auto",
    threads: Threads = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes calls of tools: hermes, llama3, mistral, auto (as its chat template does), "
            "or none (calls stay in the text)."
        ),
    ] = "auto",
    limits: RequestLimits,
    access: Access,
) -> None:
    """Serve a model over OpenAI's HTTP API inside a memory limit; http://HOST:PORT/ is a page to chat on."""
    try:
        from millpond.server.settings import ServerSettings
        from millpond.server.uvicorn_server import run
    except ModuleNotFoundError as error:
        raise OptionError(f"the server needs {error.name}: pip install 'millpond[server]'") from error
    from millpond.engine.async_llm import AsyncLLM
    from millpond.engine.config import EngineConfig

    settings = ServerSettings(**limits.as_settings(), **access.as_settings(), tool_parser=tool_parser)
    config = EngineConfig(**cache.for_request(), calibration=cache.calibration, **engine.as_arguments())
    llm = AsyncLLM(
        model, config, model_name=served_name or name_of(model), dtype=None if dtype == "auto" else dtype,
        threads=threads, memory=memory, disk=disk,
    )  # fmt: skip
    if not settings.api_keys and host not in ("127.0.0.1", "localhost", "::1"):
        errors().print(
            f"[yellow]note:[/] anyone who can reach {escape(host)} may use the model; --api-key limits that to holders "
            "of a key"
        )
    run(llm, settings, host=host, port=port)


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
