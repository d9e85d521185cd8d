"""What registered builders say of themselves: their paper and a table of their options."""

from __future__ import annotations

from typing import Any

from generated.markup import cell, left
from millpond.registry import Entry
from millpond_lab.bench.common.report import markdown_table


def option_table(entry: Entry[Any]) -> str:
    """The options of a registered builder."""
    rows = [
        (f"`{o.name}`", cell(o.type_name), o.range_text, "" if o.default == "" else f"`{o.default}`", cell(o.help))
        for o in entry.options.values()
    ]
    head = ("option", "type", "range", "default", "what it does")
    return left(markdown_table(head, rows)) if rows else "No options.\n"


def paper(entry: Entry[Any]) -> str:
    """A link to the paper; its name alone where it does not lie on arXiv."""
    number = entry.paper.removeprefix("arXiv:")
    return entry.paper if number == entry.paper else f"[{entry.paper}](https://arxiv.org/abs/{number})"
