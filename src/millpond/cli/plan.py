"""`millpond plan`: what lies where when a model runs in a memory limit, how fast it will be, and what bounds it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from millpond.cli.console import notes, output, size
from millpond.cli.options import CacheChoice, ModelName, expand_groups, optional

if TYPE_CHECKING:
    from millpond.engine.offload.plan import Plan

#: Columns of the table, and the purposes of bytes that each of them sums.
COLUMNS = {
    "weights": ("weights", "embeddings and head", "slots"),
    "KV": ("kv", "kv windows"),
    "activations": ("activations", "logits"),
}


@expand_groups
def plan(
    *,
    model: ModelName = "pond-recall",
    memory: Annotated[str, typer.Option(help="Memory for weights, KV and buffers together: '1GiB'.")],
    disk: Annotated[
        Path | None, optional(help="A folder on the disk that weights may stay on. Default: all must fit in memory.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    new: Annotated[int, typer.Option(min=1, help="New tokens of an answer.")] = 128,
    cache: CacheChoice,
    weights: Annotated[
        str | None, optional(help="Matrices packed in a file of the disk folder: int8 or int4. Default: as saved.")
    ] = None,
    latency: Annotated[
        float | None, optional(help="Most seconds from the first prompt to the last token of a block. Default: any.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the machine again, about 30 s.")] = False,
    out: Annotated[Path | None, optional(help="Write the plan here too, as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan how a model runs inside a memory limit: what lies where, at which speed, and what would make it faster."""
    from millpond.engine.offload.options import bar
    from millpond.engine.offload.plan import save_plan, sentences, to_json
    from millpond.engine.offload.planner import plan as make_plan

    kept = cache.kept()
    with notes(), bar() as report:
        placement = make_plan(
            model,
            memory=memory,
            disk=disk,
            prompt_tokens=prompt,
            new_tokens=new,
            options=cache.options,
            weights=weights,
            latency_s=latency,
            measure=measure,
            report=report,
            **kept,
        )
    if out is not None:
        save_plan(placement, out)
    if json:
        typer.echo(to_json(placement), nl=False)
        return
    output().print(table(placement))
    for line in sentences(placement):
        output().print(line, soft_wrap=True, highlight=False)


def table(plan: Plan) -> Table:
    """Return a table of tiers x (weights, KV, activations), in bytes."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("tier")
    for name in (*COLUMNS, "together"):
        grid.add_column(name, justify="right", no_wrap=True)
    assert plan.prediction is not None, "a plan that was searched for"
    for tier, purposes in plan.prediction.bytes.items():
        if purposes:
            cells = [sum(purposes.get(name, 0) for name in names) for names in COLUMNS.values()]
            grid.add_row(tier, *(size(n) if n else "" for n in cells), size(sum(cells)))
    return grid
