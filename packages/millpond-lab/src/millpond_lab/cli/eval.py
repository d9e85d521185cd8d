"""`millpond eval`: the cost of methods in quality, measured by decoding with the evicting cache."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from millpond.cli.console import errors, notes, output
from millpond.cli.options import CalibrationFile, CodecName, ModelOptions, PluginFile, Threads, expand_groups, optional
from millpond.errors import unknown
from millpond_lab.cli.options import Samples, SampleSeed

if TYPE_CHECKING:
    from millpond_lab.evals.decoding.record import Cell, SummaryRow
    from millpond_lab.evals.harness.plan import EvalPlan
    from millpond_lab.evals.harness.run import Progress

#: Of `--format`.
FORMATS = ("kvpress",)


@expand_groups
def evaluate(
    *,
    tasks: Annotated[
        str, typer.Option(help="Tasks, separated by commas; options as in niah_single:length=4096.", show_default=False)
    ],
    method: Annotated[str, typer.Option(help="Methods; options as in h2o:recent=0.1:sinks=0.")] = "full,h2o,window",
    budget: Annotated[
        str | None, optional(help="'20%' of each prompt, 512 tokens per KV head, '64KiB' a sequence. Default: 20%.")
    ] = None,
    codec: CodecName = "auto",
    calibration: CalibrationFile = None,
    protocol: Annotated[
        str,
        typer.Option(
            help="aware: the question is compressed with the context. agnostic: the context before any question. "
            "turns: as agnostic, questions one after another."
        ),
    ] = "aware",
    plugin: PluginFile = None,
    model: ModelOptions,
    samples: Samples = 40,
    seed: SampleSeed = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at once; no score depends on it.")] = 8,
    out: Annotated[Path, typer.Option(help="Folder of the results; an interrupted run continues there.")] = Path(
        "millpond-eval"
    ),
    format: Annotated[
        str | None, optional(help="kvpress: also write the folders of kvpress's evaluation, in OUT/kvpress.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Score methods x budgets x codecs on tasks; lists are separated by commas."""
    from millpond.plugin_file import load_plugin
    from millpond_lab.evals.harness.plan import EvalPlan
    from millpond_lab.evals.report import kvpress_folders
    from millpond_lab.evals.spec import parse_specs, words
    from millpond_lab.evals.task import TASKS

    if format is not None and format not in FORMATS:
        raise unknown("format", format, FORMATS)
    load_plugin(plugin, TASKS)
    plan = EvalPlan(
        model.model,
        parse_specs(method, "method"),
        parse_specs(tasks, "tasks"),
        None if budget is None else words(budget, "budget"),
        words(codec, "codec"),
        words(protocol, "protocol"),
        samples=samples,
        seed=seed,
        batch_size=batch_size,
        dtype=model.dtype,
        calibration=calibration,
    )
    if format is not None:
        kvpress_folders.check(plan)
    rows = _run(plan, model, out, threads, format)
    show_scores(rows, out)


def _run(plan: EvalPlan, model: ModelOptions, out: Path, threads: int | None, format: str | None) -> list[SummaryRow]:
    import torch

    from millpond_lab.bench.common.machine import describe_machine
    from millpond_lab.evals.harness.run import run
    from millpond_lab.evals.report.kvpress_folders import FOLDER, KvpressFolders

    torch.set_num_threads(threads or torch.get_num_threads())
    loaded, tokenizer = model.load()
    machine = describe_machine()
    note = {
        "command": shlex.join(["millpond", *sys.argv[1:]]),
        "device": str(loaded.device),
        "hardware": machine.hardware,
        "software": machine.software,
    }
    writer = None if format is None else KvpressFolders(out / FOLDER, plan.dtype, str(loaded.device))
    with notes(), progress_bars(plan.cells()) as progress:
        return run(plan, loaded, tokenizer, out, note, progress, writer=writer)


@contextmanager
def progress_bars(cells: list[Cell]) -> Iterator[Progress]:
    """One bar over the cells that are done and one over the samples of the current one, gone when all is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    ready: set[Cell] = set()
    with Bars(*columns, console=errors(), transient=True) as bars:
        whole = bars.add_task("cells", total=len(cells))
        part = bars.add_task("samples", total=None)

        def show(cell: Cell, done: int, total: int) -> None:
            name = " ".join(filter(None, [cell.method, cell.budget, cell.task, cell.protocol]))
            bars.update(part, completed=done, total=total, description=escape(name))
            if done == total:
                ready.add(cell)
            bars.update(whole, completed=len(ready))

        yield show


def show_scores(rows: list[SummaryRow], out: Path) -> None:
    """The table, and what a person must know before believing it."""
    from millpond_lab.cli.score_table import failure_note, score_table
    from millpond_lab.evals.harness.summary import HOW

    screen = output()
    screen.print(score_table(rows))
    screen.print(f"\n[dim]{HOW} Written to {escape(str(out))}[/]", soft_wrap=True)
    failed = failure_note(rows, out)
    if failed:
        errors().print(f"[bold yellow]warning:[/] {escape(failed)}", soft_wrap=True, highlight=False)
