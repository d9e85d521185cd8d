"""The page of the tasks of `millpond eval`."""

from __future__ import annotations

import inspect

from generated.markup import NOTE
from generated.options import option_table, paper
from millpond_lab.evals.task import TASKS


def tasks_page() -> str:
    """Every task of `millpond eval` with its options."""
    how = "Options follow the name: `--tasks niah_single:length=2048:variant=2`."
    parts = [f"{NOTE}# Tasks of `millpond eval`\n\n{how}\n"]
    for name in TASKS.names():
        entry = TASKS.get(name)
        source = f"{paper(entry)}\n\n" if entry.paper else ""
        parts.append(f"## `{name}`\n\n{source}{inspect.getdoc(entry.build)}\n")
        parts.append(option_table(entry))
    return "\n".join(parts)
