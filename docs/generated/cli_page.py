"""The page of the command line."""

from __future__ import annotations

from typing import Any

import typer.main

from generated.markup import NOTE, cell, left
from millpond.cli.app import app
from millpond_lab.bench.common.report import markdown_table

INTRODUCTION = """
`python -m millpond` is the same as `millpond`.

```sh
millpond methods                     # all methods
millpond methods h2o                 # one method with its options
cat text.txt | millpond generate --model FOLDER_OR_HUB_ID --prompt-file - --method snapkv --budget 512 -o window=16
```

The text is streamed to standard output, and a summary is written to standard error:

```sh
millpond generate --prompt "anna kettle and so on <ask> anna <is>" --max-new-tokens 2
```

```text
anna kettle
prompt 9 tokens at ... tokens/s · 2 new at ... tokens/s · KV 40.0 KiB held, 27.5 KiB of it in unfilled pages, full cache 25.0 KiB (160%) · nothing of the prompt forgotten
```

* `--budget` is `20%`, `512` or `64MiB`, as in Python; `full` takes none.
* `-o name=value` sets an option of the method; it may be repeated.
  Unknown names are refused with a suggestion.
* `--temperature 0` is greedy.
  `--chunk 512` evicts behind every 512 tokens of a prompt, which bounds the peak.
* Exit status: 0, or 2 with one sentence on standard error if the request cannot be fulfilled.
"""  # noqa: E501


def cli_page() -> str:
    """Every command with its options."""
    parts = [f"{NOTE}# Command line\n{INTRODUCTION}"]
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
