"""All commands, and the conversion of errors to sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from millpond.cli import (
    batch,
    calibrate,
    chat,
    chunks,
    documents,
    eval_peer,
    fit,
    generate,
    inspect,
    leaderboard,
    list_registry,
    lm_eval,
    models,
    plan,
    plot,
    serve,
)
from millpond.cli import eval as evaluation
from millpond.cli.bench import app as bench
from millpond.cli.bench import batch as bench_batch
from millpond.cli.bench import chunks as bench_chunks
from millpond.cli.bench import cluster as bench_cluster
from millpond.cli.bench import engines as bench_engines
from millpond.cli.bench import offload as bench_offload
from millpond.cli.bench import paging as bench_paging
from millpond.cli.bench import serve as bench_serve
from millpond.cli.cluster import app as cluster
from millpond.cli.console import errors
from millpond.cli.demo import command as demo
from millpond.cli.train import app as train
from millpond.errors import MillpondError

EXIT_USER_ERROR = 2


class Commands(TyperGroup):
    """Shows Millpond's own errors as one red sentence; anything else is a bug and keeps its traceback."""

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


COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate.generate,
    "batch": batch.batch,
    "remember": documents.remember,
    "ask": documents.ask,
    "chat": chat.chat,
    "demo": demo.demo,
    "calibrate": calibrate.calibrate,
    "fit": fit.fit,
    "eval": evaluation.evaluate,
    "eval-peer": eval_peer.eval_peer,
    "lm-eval": lm_eval.lm_eval,
    "inspect": inspect.inspect,
    "serve": serve.serve,
    "plan": plan.plan,
    "plot": plot.plot,
    "leaderboard": leaderboard.leaderboard,
    "methods": list_registry.methods,
    "codecs": list_registry.codecs,
}
#: lm-eval reads all of its arguments itself.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
for name, command in COMMANDS.items():
    app.command(name, context_settings=PASSED_ON if name == "lm-eval" else None)(command)
bench.app.command("batch")(bench_batch.batch)
bench.app.command("chunks")(bench_chunks.chunks)
bench.app.command("engines")(bench_engines.engines)
bench.app.command("offload")(bench_offload.offload)
bench.app.command("paging")(bench_paging.paging)
bench.app.command("serve")(bench_serve.serve)
bench.app.command("cluster")(bench_cluster.cluster)
app.add_typer(models.app, name="models")
app.add_typer(chunks.app, name="chunks")
app.add_typer(bench.app, name="bench")
app.add_typer(cluster.app, name="cluster")
app.add_typer(train.app, name="train")
