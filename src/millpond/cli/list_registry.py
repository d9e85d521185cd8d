"""`millpond methods` and `millpond codecs`: lists from the registry."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from millpond.cli.console import output
from millpond.cli.options import PluginFile

if TYPE_CHECKING:
    from millpond.registry import Entry


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this method with its options.", show_default=False)] = None,
    plugin: PluginFile = None,
) -> None:
    """List the methods that decide what is kept, or show one with its options."""
    from millpond.methods import METHODS
    from millpond.plugin_file import load_plugin

    load_plugin(plugin)
    output().print(_overview() if name is None else _page(METHODS.get(name)))


def codecs() -> None:
    """List the number formats in which entries can be stored."""
    from millpond.codec import list_codecs

    for name in list_codecs():
        typer.echo(name)


def _overview() -> Table:
    from millpond.methods import METHODS

    table = Table(title="Methods", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("name", "paper", "what it keeps"):
        table.add_column(heading, no_wrap=heading != "what it keeps")
    for name in METHODS.names():
        entry = METHODS.get(name)
        table.add_row(f"[bold]{name}[/]", entry.paper or "[dim]baseline[/]", escape(entry.summary))
    return table


def _page(entry: Entry[Any]) -> Group:
    paper = f"  [dim]{entry.paper}[/]" if entry.paper else ""
    parts: list[Any] = [f"[bold]{entry.name}[/]{paper}", "", escape(_flow(inspect.getdoc(entry.build) or ""))]
    if entry.options:
        parts += ["", _options(entry)]
    return Group(*parts)


def _flow(text: str) -> str:
    """Return paragraphs without the line breaks of the source."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _options(entry: Entry[Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("option", "type", "range", "default", "what it does"):
        table.add_column(heading, no_wrap=heading == "option")
    for option in entry.options.values():
        table.add_row(
            f"[bold]{option.name}[/]",
            escape(option.type_name),
            option.range_text,
            str(option.default),
            escape(option.help),
        )
    return table
