"""Options of the commands that are settings of an engine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from millpond.plugins import parse_options

Method = Annotated[str, typer.Option(help="Name of the method; 'millpond-vllm check MODEL' lists those that act here.")]
Budget = Annotated[
    str, typer.Option(help="Entries per KV head: 20% of each prompt, or 512 tokens; none keeps everything.")
]
Recent = Annotated[
    int | None,
    typer.Option(min=0, help="Newest tokens that never compete. Default: those of the method.", show_default=False),
]
Prefill = Annotated[
    str,
    typer.Option(
        help="once evicts at a prompt's end, chunks also inside it, auto inside it where it is longer than the pool."
    ),
]
Chunk = Annotated[int, typer.Option(min=1, help="Tokens between two evictions inside a prompt.")]
Force = Annotated[bool, typer.Option("--force", help="Run on a version of vLLM that was not tested.")]
MethodOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="Option of the method: see 'millpond methods NAME'.",
        show_default=False,
    ),
]


def engine_settings(
    method: str, budget: str, recent: int | None, prefill: str, chunk: int, force: bool, option: list[str] | None
) -> dict[str, Any]:
    """Return the settings of an engine that a command line gives, as `EngineSettings` takes them.

    Raises:
        OptionError: an option of the method that does not read name=value.
    """
    given: dict[str, Any] = {"method": method, "budget": budget, "prefill": prefill, "chunk": chunk}
    if recent is not None:
        given["recent"] = recent
    if force:
        given["force"] = True
    options = parse_options(option or [])
    return {**given, "options": options} if options else given
