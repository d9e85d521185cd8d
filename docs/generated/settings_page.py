"""The page of settings: a table for each dataclass that has some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import typer.main

from generated.markup import NOTE, cell, left
from millpond.cli.app import app
from millpond.cluster.settings import ClusterSettings
from millpond.engine.settings import EngineSettings, LoadSettings
from millpond.server.settings import ServerSettings
from millpond.setting import default_of, flag_of, settings_of
from millpond_lab.bench.common.report import markdown_table

INTRO = """\
Every setting of engines, of the models that they load, of clusters and of the server, once: the name in Python, and
the flag of `millpond serve` where there is one.
Most flags are those of `millpond batch` too, and some those of `generate` and `chat`: [command line](cli.md).
A value that is refused is named with its rule in an `OptionError` or a `BudgetError`, before a model is loaded.
"""
TABLES = {
    "Engine": (
        EngineSettings,
        "Keyword arguments of `LLM`, `AsyncLLM`, `Engine` and the two of a cluster; together an `EngineConfig`.",
    ),
    "Loading": (LoadSettings, "Keyword arguments of `LLM` and `AsyncLLM`: the model, and where it lies."),
    "Cluster": (
        ClusterSettings,
        "Keyword arguments of `millpond.cluster.LLM` and `AsyncLLM`, beside those of the engine.",
    ),
    "Server": (ServerSettings, "Fields of `millpond.server.settings.ServerSettings`."),
}


def settings_page() -> str:
    """The page in Markdown."""
    command: Any = typer.main.get_command(app)
    flags = {flag for option in command.commands["serve"].params for flag in option.opts}
    parts = [f"{NOTE}# Settings\n\n{INTRO}"]
    for title, (kind, about) in TABLES.items():
        table = markdown_table(("name", "type", "default", "flag", "what it does"), _rows(kind, flags))
        parts.append(f"## {title}\n\n{about}\n\n{left(table)}")
    return "\n".join(parts)


def _rows(kind: type, flags: set[str]) -> Iterator[tuple[str, ...]]:
    types = {one.name: str(one.type) for one in fields(kind)}
    for name, one in settings_of(kind).items():
        own, flag = default_of(kind, name), flag_of(kind, name)
        default = one.default_text or ("" if own in (None, (), {}) else f"`{own}`")
        variable = f"`millpond serve` reads `{one.variable}` too." if one.variable else ""
        about = " ".join(filter(None, (one.help, one.more, variable)))
        shown = f"`{flag}`" if flag in flags else ""
        yield f"`{name}`", f"`{cell(types[name])}`", cell(default), shown, cell(about)
