"""`millpond serve`: a model behind an OpenAI-compatible address, and a page that shows what it remembers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from millpond.cli.console import errors
from millpond.cli.options import (
    BudgetText,
    CalibrationFile,
    DtypeName,
    MethodName,
    MethodOptions,
    ModelName,
    PresetName,
    kept_as,
    optional,
    parse_options,
)
from millpond.errors import OptionError

#: Where API keys may stand, separated by commas, so that no list of processes shows them.
KEYS_VARIABLE = "MILLPOND_API_KEYS"
#: Where KEY=N may stand, likewise.
LIMITS_VARIABLE = "MILLPOND_PRIORITY_LIMITS"


def serve(
    context: typer.Context,
    model: ModelName = "pond-recall",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_name: Annotated[str | None, optional(help="What clients call the model. Default: as --model.")] = None,
    method: MethodName = "h2o",
    budget: BudgetText = None,
    option: MethodOptions = None,
    codec: Annotated[str | None, optional(help="How entries are stored: see 'millpond codecs'.")] = None,
    preset: PresetName = None,
    calibration: CalibrationFile = None,
    kv_memory: Annotated[
        str | None, optional(help="Most memory for the caches of all requests together ('2GiB'). Default: no limit.")
    ] = None,
    dtype: DtypeName = "auto",
    threads: Annotated[int | None, optional(min=1, help="Threads of the model. Default: torch's own choice.")] = None,
    max_step_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one step: more read prompts faster, fewer keep answers flowing.")
    ] = 512,
    prefix_cache: Annotated[
        bool | None,
        optional(
            "--prefix-cache/--no-prefix-cache",
            help="Keep prompts for others that begin alike, while there is room. Default: with --kv-memory.",
        ),
    ] = None,
    swap_to: Annotated[
        Path | None,
        optional(help="A folder for caches of requests that make room for others. Default: the host's memory."),
    ] = None,
    runner: Annotated[
        str, typer.Option(help="How tokens pass the model: lean, modules (those of transformers), or auto.")
    ] = "auto",
    max_queue: Annotated[int, typer.Option(min=1, help="Prompts that may wait; beyond it: 429.")] = 256,
    max_tokens: Annotated[
        int | None, optional(min=1, help="Most new tokens per answer. Default: what the context holds.")
    ] = None,
    max_body: Annotated[str, typer.Option(help="Longest body of a request.")] = "16MiB",
    max_body_items: Annotated[
        int, typer.Option(min=16, help="Most values in it; an eighth as many keys, a sixteenth as many objects.")
    ] = 2**17,
    max_bodies: Annotated[
        str, typer.Option(help="Most bytes of the bodies of all requests that are not answered.")
    ] = "256MiB",
    max_connections: Annotated[
        int, typer.Option(min=1, help="Beyond it the connection is closed that keeps the server waiting longest.")
    ] = 512,
    header_timeout: Annotated[float, typer.Option(help="Seconds for the header of a request to come.")] = 10.0,
    body_timeout: Annotated[float, typer.Option(help="Seconds for its body to come.")] = 30.0,
    write_timeout: Annotated[
        float, typer.Option(help="Seconds after which a client that does not read its answer is let go.")
    ] = 60.0,
    timeout: Annotated[
        float | None, optional(help="Seconds after which a request ends with what it has. Default: none.")
    ] = None,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds that requests have to finish when the server is stopped.")
    ] = 30.0,
    step_limit: Annotated[
        float, typer.Option(help="Seconds that a step of the engine may take; beyond it /health says 503.")
    ] = 120.0,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes calls of tools: hermes, llama3, mistral, auto (as its chat template does), "
            "or none (calls stay in the text)."
        ),
    ] = "auto",
    option_file: Annotated[
        list[str] | None,
        optional(
            metavar="NAME=PATH",
            help="A file that options of requests may name, by this name; may be repeated. Others they cannot name.",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        optional(help=f"A key that clients must send; may be repeated. Also: {KEYS_VARIABLE}, separated by commas."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        optional(help="A name by which clients may call the server, beside localhost; may be repeated."),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        optional(
            metavar="ADDRESS",
            help="A proxy, or a network of them, whose X-Forwarded-For says who asks; may be repeated. Default: none, "
            "so clients without keys are told apart by the addresses that they connect from.",
        ),
    ] = None,
    priority_limit: Annotated[
        list[str] | None,
        optional(
            metavar="[KEY=]N",
            help="The lowest (best) priority that requests with a key may ask for; without KEY=: all others. Default: "
            f"0. May be repeated. Also: {LIMITS_VARIABLE}, separated by commas.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Serve a model over HTTP as OpenAI's API does, inside a memory limit; http://HOST:PORT/ is a page to chat on."""
    try:
        from millpond.server.settings import ServerSettings
        from millpond.server.uvicorn_server import run
    except ModuleNotFoundError as error:
        raise OptionError(f"the server needs {error.name}: pip install 'millpond[server]'") from error
    from millpond.budget import parse_bytes
    from millpond.engine.async_llm import AsyncLLM
    from millpond.engine.config import EngineConfig

    settings = ServerSettings(
        api_keys=(*(api_key or ()), *keys_of(os.environ.get(KEYS_VARIABLE, ""))), max_queue=max_queue,
        max_tokens=max_tokens, max_body_bytes=parse_bytes(max_body), max_body_items=max_body_items,
        max_bytes_under_way=parse_bytes(max_bodies), max_connections=max_connections, header_timeout_s=header_timeout,
        body_timeout_s=body_timeout, write_timeout_s=write_timeout, timeout_s=timeout, drain_s=drain,
        step_limit_s=step_limit, tool_parser=tool_parser,
        option_files=parse_options(option_file or [], "heads=heads.json"),
        allowed_hosts=tuple(allow_host or ()), trusted_proxies=tuple(trusted_proxy or ()),
        priority_limits=limits_of([*keys_of(os.environ.get(LIMITS_VARIABLE, "")), *(priority_limit or ())]),
    )  # fmt: skip
    kept = kept_as(context, preset, method, budget, codec)
    config = EngineConfig(
        **kept, options=parse_options(option or []), calibration=calibration, kv_memory=kv_memory,
        max_step_tokens=max_step_tokens, prefix_cache=kv_memory is not None if prefix_cache is None else prefix_cache,
        swap_to=swap_to, runner=runner,  # type: ignore[arg-type]  # checked there
    )  # fmt: skip
    dtype_or_none = None if dtype == "auto" else dtype
    llm = AsyncLLM(
        model, config, model_name=served_name or name_of(model), dtype=dtype_or_none, threads=threads
    )
    if not settings.api_keys and host not in ("127.0.0.1", "localhost", "::1"):
        errors().print(f"[yellow]note:[/] anybody who reaches {escape(host)} may ask; --api-key keeps others out")
    run(llm, settings, host=host, port=port)


def keys_of(text: str) -> list[str]:
    """API keys that stand in a variable, separated by commas.

    Example:
        >>> keys_of("one, two,")
        ['one', 'two']
    """
    return [key.strip() for key in text.split(",") if key.strip()]


def limits_of(texts: list[str]) -> dict[str, int]:
    """Priority limits by key; that of all others by "".

    Raises:
        OptionError: no whole number.

    Example:
        >>> limits_of(["alice=-5", "2"])
        {'alice': -5, '': 2}
    """
    limits = {}
    for text in texts:
        key, _, number = text.rpartition("=")
        try:
            limits[key] = int(number)
        except ValueError:
            shown = "KEY=..." if key else repr(text)  # a key is not shown
            raise OptionError(f"--priority-limit {shown}: must be a whole number, or KEY= and one") from None
    return limits


def name_of(model: str) -> str:
    """What clients call a model: a hub id or a bundled name as it is, a folder by its last part.

    Example:
        >>> name_of("pond-recall")
        'pond-recall'
    """
    return Path(model).resolve().name if Path(model).is_dir() else model
