"""`millpond cluster`: measure a model's steps, and compare layouts of workers before they exist."""

from __future__ import annotations

import typer

from millpond_lab.cli.cluster import plan, profile

app = typer.Typer(no_args_is_help=True, help="Measure a model's steps, and plan how many workers do what.")


@app.callback()
def _cluster() -> None:
    """Measure a model's steps, and plan how many workers do what."""


app.command("profile")(profile.profile)
app.command("plan")(plan.plan)
