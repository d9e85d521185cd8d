"""`millpond bench batch`: prompts with common beginnings, planned and in the order of arrival."""

from __future__ import annotations

from typing import Annotated

import typer

from millpond.cli.console import errors
from millpond.cli.options import PluginFile, Threads, optional
from millpond_lab.cli.bench.common import check_share, command_line, deliver
from millpond_lab.cli.options import Quick, Report


def batch(
    tree: Annotated[
        str,
        typer.Option(help="Texts that follow each text of the level before, and their tokens: COUNTxTOKENS per level."),
    ] = "2x220,6x260,6x50",
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "full,snapkv,h2o",
    plugin: PluginFile = None,
    budget: Annotated[str, typer.Option(help="A share of the prompt, for methods that evict.")] = "20%",
    kv_memory: Annotated[str | None, optional(help="Limit of the caches ('8MiB'). Default: none.")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions in turns.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of tokens, order and weights.")] = 0,
    threads: Threads = None,
    quick: Quick = False,
    out: Report = None,
) -> None:
    """Time a planned batch, arrival order and sorted order, all with a prefix cache; report what each spares."""
    import torch

    from millpond.plugin_file import load_plugin
    from millpond_lab.bench.batch import BatchBench, markdown, parse_tree, run
    from millpond_lab.bench.generate.candidates import TINY, ModelShape

    load_plugin(plugin)
    check_share(budget)
    torch.set_num_threads(threads or torch.get_num_threads())
    plan = BatchBench(
        tuple(parse_tree(tree)),
        tuple(name.strip() for name in methods.split(",")),
        budget,
        kv_memory,
        new_tokens,
        repeats,
        seed,
        TINY if quick else ModelShape(),
    )
    with errors().status("measuring") as status:
        data = run(plan, status.update)
    data["command"] = command_line()
    deliver("batch-quick" if quick else "batch", data, markdown(data), out)
