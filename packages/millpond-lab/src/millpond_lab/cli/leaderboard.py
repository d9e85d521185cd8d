"""`millpond leaderboard`: results of evaluations as a page of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from millpond.cli.console import errors, output


def leaderboard(
    results: Annotated[
        list[Path],
        typer.Argument(help="Folders that 'millpond eval' wrote, or their summary.json.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("docs/leaderboard.md"),
    check: Annotated[bool, typer.Option("--check", help="Compare only: status 1 if the page differs.")] = False,
) -> None:
    """Write results as a table: methods x tasks for each model, protocol and budget, best first."""
    from millpond.cli.inspect import write
    from millpond_lab.evals.harness.summary import read_notes, read_rows, unite
    from millpond_lab.evals.report.leaderboard import render

    rows = unite([row for path in results for row in read_rows(path)])
    text = render(rows, [note for path in results for note in read_notes(path)])
    if not check:
        write(out, text)
        output().print(f"{len(rows)} results written to {escape(str(out))}", soft_wrap=True, highlight=False)
    elif not out.exists() or out.read_text(encoding="utf-8") != text:
        errors().print(
            f"[bold red]error:[/] {escape(str(out))} is not what the results say; run the same command without --check",
            soft_wrap=True,
            highlight=False,
        )
        raise typer.Exit(1)
