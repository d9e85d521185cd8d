"""`millpond bench cluster`: one engine, replicas and split workers under the same load."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from millpond.cli.console import errors
from millpond.cli.options import ModelName, Threads
from millpond_lab.cli.bench.common import command_line, deliver
from millpond_lab.cli.options import Report


def cluster(
    model: ModelName = "pond-recall",
    layouts: Annotated[
        str, typer.Option(help="Separated by commas: single, 'one replica', 'two replicas', split.")
    ] = "single,one replica,two replicas,split",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every layout has the load once.")] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests of one load.")] = 32,
    users: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    prompt_tokens: Annotated[str, typer.Option(help="Length of prompts: 256 or 64-512.")] = "256",
    output_tokens: Annotated[str, typer.Option(help="Length of answers: 64 or 16-128.")] = "64",
    vocab_size: Annotated[int, typer.Option(min=2, help="Prompt tokens are below this id.")] = 256,
    threads: Threads = None,
    options: Annotated[
        str, typer.Option(help="More options of 'millpond serve' for every layout: '--method h2o --budget 20%'.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, lengths and the order of layouts.")] = 0,
    out: Report = None,
) -> None:
    """Load a server of each layout in turns through HTTP; compare them within each round."""
    from millpond_lab.bench.cluster import ClusterBench, markdown, run

    given = ["--model", model, *([] if threads is None else ["--threads", str(threads)]), *shlex.split(options)]
    bench = ClusterBench(
        layouts=tuple(name.strip() for name in layouts.split(",")),
        options=tuple(given),
        rounds=rounds,
        requests=requests,
        users=users,
        prompt=prompt_tokens,
        output=output_tokens,
        vocab_size=vocab_size,
        seed=seed,
    )
    with errors().status("measuring") as status:
        data = run(bench, status.update)
    data["command"] = command_line()
    deliver("cluster", data, markdown(data), out)
