"""`millpond bench chunks`: prompts of stored chunks, by time and by tokens computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.console import errors
from millpond.cli.options import ChunkDtype, Threads
from millpond.errors import OptionError
from millpond_lab.cli.bench.common import command_line, deliver
from millpond_lab.cli.options import Quick, Report

if TYPE_CHECKING:
    from millpond.policy.reuse import Recompute


def chunks(
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of a prompt whose first token is timed.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of them.")] = 256,
    shares: Annotated[
        str, typer.Option(help="What is computed again, separated by commas: auto, or a share from 0 to 1.")
    ] = "auto,0.15,0",
    queries: Annotated[int, typer.Option(min=0, help="Queries of the steady stream; 0: none.")] = 2000,
    per_query: Annotated[int, typer.Option(min=1, help="Chunks of a query.")] = 8,
    pool: Annotated[int, typer.Option(min=1, help="Chunks that queries pick from; the store holds half.")] = 200,
    query_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of these.")] = 32,
    chunk_dtype: ChunkDtype = "auto",
    rule: Annotated[str, typer.Option(help="Rule by which a full store evicts: lru, lfu, learned, ...")] = "lru",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions in turns.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of tokens, orders and weights.")] = 0,
    threads: Threads = None,
    quick: Quick = False,
    out: Report = None,
) -> None:
    """Time first tokens with chunks from memory and from files, and count what many queries compute."""
    import torch

    from millpond_lab.bench.chunks import ChunkBench, markdown, run
    from millpond_lab.bench.generate.candidates import TINY, ModelShape

    if per_query > pool:
        raise OptionError(f"--per-query {per_query} is more than the --pool of {pool} chunks; lower it or raise --pool")
    torch.set_num_threads(threads or torch.get_num_threads())
    plan = ChunkBench(
        chunks=chunks,
        tokens=tokens,
        shares=parse_shares(shares),
        dtype=chunk_dtype,
        rule=rule,
        repeats=repeats,
        n_queries=queries,
        per_query=per_query,
        pool=pool,
        query_tokens=query_tokens,
        seed=seed,
        shape=TINY if quick else ModelShape(),
    )
    with errors().status("measuring") as status:
        data = run(plan, status.update)
    data["command"] = command_line()
    deliver("chunks-quick" if quick else "chunks", data, markdown(data), out)


def parse_shares(text: str) -> tuple[Recompute, ...]:
    """Shares that are computed again.

    Raises:
        OptionError: neither auto nor a number from 0 to 1.

    Example:
        >>> parse_shares("auto,0.15")
        ('auto', 0.15)
    """
    from millpond.policy.reuse import check_recompute

    found: list[Recompute] = []
    for part in (part.strip() for part in text.split(",")):
        try:
            share: Recompute = "auto" if part == "auto" else float(part)
        except ValueError:
            raise OptionError(f'--shares {text!r}: {part!r} must be "auto" or a share from 0 to 1') from None
        check_recompute(share)
        found.append(share)
    return tuple(found)
