"""`millpond fit`: what budgets and number formats cost a model's predictions on a text, for budget="auto"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from millpond.cli.console import errors, notes
from millpond.cli.options import ModelOptions, expand_groups, optional
from millpond.option_pairs import parse_options
from millpond_lab.cli.options import MethodName

if TYPE_CHECKING:
    from millpond.hf.fit import Fit
    from millpond_lab.fit import Progress


@expand_groups
def fit(
    *,
    text: Annotated[Path, typer.Option(help="A text like those that the model will read; may end in .gz.")],
    model: ModelOptions,
    method: MethodName = "h2o",
    option: Annotated[
        list[str] | None,
        optional("--option", "-o", metavar="NAME=VALUE", help="Option of the method: see 'millpond methods NAME'."),
    ] = None,
    out: Annotated[
        Path | None, optional(help="The file to write (.json). Default: where --budget auto looks for it.")
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Budgets to measure, separated by commas.")
    ] = "5%,10%,20%,35%,50%,75%,100%",
    codec: Annotated[
        str, typer.Option(help="Number formats to measure, separated by commas; in one by age or layer write ';'.")
    ] = "auto,int8,int4",
    length: Annotated[int, typer.Option(help="Tokens of a window that are compressed.")] = 512,
    continuation: Annotated[int, typer.Option(help="Tokens that are then fed one by one.")] = 64,
    windows: Annotated[int, typer.Option(help="Windows of the text, 45 or more.")] = 80,
    batch: Annotated[int, typer.Option(help="Windows that are read together.")] = 4,
    seed: Annotated[int, typer.Option(help="Where in the text the windows begin.")] = 0,
) -> None:
    """Measure budgets and number formats on a text, for `--budget auto --max-kl X`."""
    options = parse_options(option or [])
    from millpond_lab.fit import fit as measure

    loaded, tokenizer = model.load()
    with notes(), _bar() as progress:
        found = measure(
            loaded,
            tokenizer,
            text,
            method,
            budgets=_words(budget),
            codecs=_words(codec),
            context=length,
            continuation=continuation,
            windows=windows,
            batch=batch,
            seed=seed,
            out=out,
            progress=progress,
            **options,
        )
    typer.echo(table(found))
    from millpond.hf.fit import default_path

    errors().print(f"[dim]{escape(str(out or default_path(loaded, method)))}[/]", soft_wrap=True, highlight=False)


def table(found: Fit) -> str:
    """The rows as a table, the fewest bytes first."""
    rows = [
        f"| {row.budget or 'all'} | {row.codec} | {row.bytes_share:.1%} | {sum(row.kl) / len(row.kl):.4f} | "
        f"{row.bound:.4f} |"
        for row in sorted(found.rows, key=lambda row: row.bytes_share)
    ]
    head = [
        "| budget | codec | bytes of full | mean KL | KL in 95 % of windows |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    return "\n".join([*head, *rows])


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


@contextmanager
def _bar() -> Iterator[Progress]:
    """A bar over the settings of each batch of windows; gone when all is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=errors(), transient=True) as bars:
        task = bars.add_task("settings", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
