"""All commands, and the conversion of errors to sentences."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from millpond import MillpondError
from millpond_vllm.cli.check import check
from millpond_vllm.cli.serve import serve
from millpond_vllm.cli.trial import trial
from millpond_vllm.cli.vllm_command import TrialCommand, VllmCommand

EXIT_USER_ERROR = 2


class Commands(TyperGroup):
    """Commands that report Millpond's errors as one red sentence; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except MillpondError as error:
            Console(stderr=True).print(f"[bold red]error:[/] [red]{escape(str(error))}[/]", soft_wrap=True)
            raise typer.Exit(EXIT_USER_ERROR) from None


def _version(wanted: bool) -> None:
    if wanted:
        import millpond

        typer.echo(f"millpond-vllm {millpond.__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="KV cache eviction inside an unmodified vLLM, by the methods of Millpond.",
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """KV cache eviction inside an unmodified vLLM, by the methods of Millpond."""


app.command("serve", cls=VllmCommand)(serve)
app.command("check", cls=VllmCommand)(check)
app.command("trial", cls=TrialCommand)(trial)


def main() -> None:
    """Run the command line."""
    app(prog_name="millpond-vllm")
