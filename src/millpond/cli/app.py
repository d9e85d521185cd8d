"""All commands, and the conversion of errors to sentences."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from millpond.cli import (
    batch,
    calibrate,
    chat,
    chunks,
    documents,
    generate,
    inspect,
    list_registry,
    models,
    plan,
    serve,
)
from millpond.cli.added_commands import Command, add_command, added_commands
from millpond.cli.console import errors
from millpond.cli.demo import command as demo
from millpond.errors import MillpondError

EXIT_USER_ERROR = 2


class Commands(TyperGroup):
    """Commands that report Millpond's errors as one red sentence.

    Anything else is a bug and keeps its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MillpondError as error:
            errors().print(f"[bold red]error:[/] [red]{_plain(error)}[/]", soft_wrap=True, highlight=False)
            raise typer.Exit(EXIT_USER_ERROR) from None


def _plain(error: MillpondError) -> str:
    from rich.markup import escape

    return escape(str(error))


def _version(wanted: bool) -> None:
    if wanted:
        import millpond

        typer.echo(f"millpond {millpond.__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Give any Hugging Face decoder a KV cache inside a memory budget.",
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Give any Hugging Face decoder a KV cache inside a memory budget."""


#: In the order of the help, groups after commands; None: it is a command of millpond-lab.
COMMANDS: dict[str, Command | None] = {
    "generate": generate.generate,
    "batch": batch.batch,
    "remember": documents.remember,
    "ask": documents.ask,
    "chat": chat.chat,
    "demo": demo.demo,
    "calibrate": calibrate.calibrate,
    "fit": None,
    "eval": None,
    "eval-peer": None,
    "lm-eval": None,
    "inspect": inspect.inspect,
    "serve": serve.serve,
    "plan": plan.plan,
    "plot": None,
    "leaderboard": None,
    "methods": list_registry.methods,
    "codecs": list_registry.codecs,
    "models": models.app,
    "chunks": chunks.app,
    "bench": None,
    "cluster": None,
    "train": None,
}
own = {name: command for name, command in COMMANDS.items() if command is not None}
#: A command of this package keeps its name, whatever others add.
all_commands = added_commands(COMMANDS.keys() - own.keys()) | own
for name in sorted(all_commands, key=lambda name: [*COMMANDS, name].index(name)):
    add_command(app, name, all_commands[name])
