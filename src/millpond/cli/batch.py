"""`millpond batch`: a file of requests in OpenAI's batch format, answered offline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from millpond.cli.chunk_options import ChunkChoice
from millpond.cli.console import errors, notes
from millpond.cli.options import CacheChoice, EnginePlace, ModelName, expand_groups, optional
from millpond.cli.serve import EngineChoice, name_of
from millpond.errors import OptionError
from millpond.install_command import install_command

if TYPE_CHECKING:
    from millpond.engine.async_llm import AsyncLLM


@expand_groups
def batch(
    file: Annotated[
        Path,
        typer.Argument(help="One request a line, as JSON with custom_id, method, url and body.", show_default=False),
    ],
    *,
    out: Annotated[
        Path, typer.Option(help="File of the answers; requests with an answer there are left out.", show_default=False)
    ],
    error_file: Annotated[
        Path | None,
        optional(help="File of the lines that were refused or failed. Default: OUT with .errors before its suffix."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be read once and how much that saves; run nothing.")
    ] = False,
    model: ModelName = "pond-recall",
    served_name: Annotated[str | None, optional(help="The model's name in the file. Default: as --model.")] = None,
    cache: CacheChoice,
    engine: EngineChoice,
    chunks: ChunkChoice,
    place: EnginePlace,
) -> None:
    """Answer a file of requests in OpenAI's batch format; beginnings that prompts share are read once."""
    try:
        from millpond.server.batch_files import BatchFile
    except ModuleNotFoundError as error:
        raise OptionError(f"batch files need {error.name}: {install_command('server')}") from error
    from millpond.engine.async_llm import AsyncLLM
    from millpond.engine.config import EngineConfig
    from millpond.server.settings import ServerSettings

    bad = error_file or out.with_suffix(f".errors{out.suffix}")
    for one in (out, bad):
        if one.resolve() == file.resolve():
            raise OptionError(f"{one} is the file of the requests; give the answers and the errors files of their own")
    config = EngineConfig(
        **cache.for_request(), calibration=cache.calibration, chunk_store=chunks.store(), **engine.as_arguments()
    )
    with notes():
        name = served_name or name_of(model)
        llm = AsyncLLM(model, config, model_name=name, **place.as_arguments(config.weights))

        async def answer() -> None:
            work = BatchFile(llm, ServerSettings())
            try:
                await (_show(work, file, out) if dry_run else _run(work, llm, file, out, bad))
            finally:
                work.close()
                await llm.close(drain=False)

        asyncio.run(answer())


async def _show(work: Any, file: Path, out: Path) -> None:
    """Print the plan, and the lines that would be refused."""
    from millpond.server.batch_files import answered_in

    await work.read(file, answered_in(out))
    for method, plan in await work.plans():
        typer.echo(f"{method}: {plan}")
    typer.echo(f"{work.n_before} lines have answers, {len(work.refused)} would be refused")
    for line in work.refused:
        errors().print(f"line {line.number}: {escape(str(line.error))}", soft_wrap=True, highlight=False)


async def _run(work: Any, llm: AsyncLLM, file: Path, out: Path, bad: Path) -> None:
    """Write the answers, and print a line about them."""
    from millpond.server.batch_files import answered_in

    await work.read(file, answered_in(out))
    asked = sum(len(request.prompt) for _, api_call in work.calls for request in api_call.requests)
    count = await work.run(out, bad)
    read = llm.stats().prompt_tokens
    where = f" (see {escape(str(bad))})" if count.refused else ""
    line = f"{count.answered} answered, {count.before} had answers before, {count.refused} refused or failed{where}"
    errors().print(f"{line}; {read:,} of {asked:,} prompt tokens were read", soft_wrap=True, highlight=False)
