"""The page of the command line."""

from __future__ import annotations

from typing import Any

import typer.main

from generated.markup import NOTE, cell, left
from millpond.cli.app import app
from millpond_lab.bench.common.report import markdown_table


def cli_page() -> str:
    """Every command with its options."""
    parts = [f"{NOTE}# Command line\n\n`python -m millpond` is the same as `millpond`.\n"]
    for name, command in commands("millpond", typer.main.get_command(app)):
        parts.append(f"## `{name}`\n\n{first_paragraph(command.help or '')}\n")
        rows = [
            option_row(p) for p in command.params if p.name not in ("help", "install_completion", "show_completion")
        ]
        if rows:
            parts.append(left(markdown_table(("option", "default", "what it does"), rows)))
    return "\n".join(parts)


def commands(name: str, command: Any) -> list[tuple[str, Any]]:
    """The command and those below it, in the order of the help."""
    below = getattr(command, "commands", {})
    return [(name, command)] + [found for child in below for found in commands(f"{name} {child}", below[child])]


def option_row(param: Any) -> tuple[str, str, str]:
    """One option or argument of a command."""
    names = (
        ", ".join(f"`{opt}`" for opt in (*param.opts, *param.secondary_opts))
        if param.opts[0][0] == "-"
        else f"`{param.name.upper()}`"
    )
    default = param.default if not callable(param.default) else None
    shown = "" if default is None or default is False or param.name == "version" else f"`{default}`"
    return names, shown, cell(getattr(param, "help", "") or "")


def first_paragraph(text: str) -> str:
    """Up to the first empty line."""
    return " ".join(text.split("\n\n")[0].split())
