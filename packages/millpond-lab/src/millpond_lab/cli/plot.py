"""`millpond plot`: the pictures that the results in a folder can give."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from millpond.cli.console import output
from millpond.cli.options import optional


def plot(
    folder: Annotated[
        Path, typer.Argument(help="What 'millpond eval' wrote, or a folder with *.trace.json.", show_default=False)
    ],
    out: Annotated[Path | None, optional(help="Folder of the pictures. Default: FOLDER/plots.")] = None,
    method: Annotated[str | None, optional(help="Only these of the run, separated by commas. Default: all.")] = None,
    format: Annotated[Literal["png", "svg", "pdf"], typer.Option(help="File format of the pictures.")] = "png",
) -> None:
    """Draw quality against bytes, needle heat maps and budgets per head, whichever the folder has numbers for."""
    from millpond_lab.evals.report.plots.folder import draw_all
    from millpond_lab.evals.spec import words

    methods = None if method is None else words(method, "method")
    for path in draw_all(folder, out or folder / "plots", format, methods):
        output().print(escape(str(path)), soft_wrap=True, highlight=False)
