"""`millpond train`: the recipes of the models that come with the package, and heads for any model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millpond.cli.options import DeviceName, Threads, optional
from millpond.errors import OptionError
from millpond_lab.cli.train import calibrate_gate, duo, gate, heavy_hitters, import_networks, kvzap, pager, retain

app = typer.Typer(no_args_is_help=True, help="Train the models that come with the package, and heads for any model.")


DataSeed = Annotated[int, typer.Option(help="Seed of weights and data.")]
MaxMinutes = Annotated[float | None, optional(help="Stop after N minutes; the same command resumes.")]
MaxSteps = Annotated[int | None, optional(min=1, help="Stop at this step of the whole run.")]
Card = Annotated[bool, typer.Option("--card", help="Measure the model and write its MODEL_CARD.md.")]


@app.callback()
def _train() -> None:
    """Train the models that come with the package, and heads for any model."""


@app.command()
def recall(
    out: Annotated[Path, typer.Option(help="Folder of the run; an existing checkpoint in it is resumed.")],
    seed: DataSeed = 0,
    max_minutes: MaxMinutes = None,
    max_steps: MaxSteps = None,
    threads: Threads = None,
    device: DeviceName = None,
    card: Card = False,
    note: Annotated[str, typer.Option(help="Note on the run, for the card.")] = "",
) -> None:
    """Train pond-recall, which answers questions about a long text of words, from nothing: an hour or two on a CPU."""
    from millpond_lab.train.recall.train import train_recall

    if note and not card:
        raise OptionError("--note is written into the card; add --card")
    run = train_recall(out, seed=seed, max_minutes=max_minutes, max_steps=max_steps, threads=threads, device=device)
    if card:
        from millpond_lab.bench.common.machine import describe_machine
        from millpond_lab.train.recall.card import write_card

        write_card(run, out, hardware=describe_machine().hardware, note=note)
    typer.echo(f"{out}: step {run.step:,}, {run.time_s / 60:.1f} minutes in all")


@app.command()
def text(
    out: Annotated[Path, typer.Option(help="Folder of the run and of the tokenized documents.")],
    data: Annotated[Path, typer.Option(help="Folder with *.txt and gutenberg/*.txt.")],
    preset: Annotated[str, typer.Option(help="cpu, its second term cpu-long, or gpu, five times as large.")] = "cpu",
    seed: DataSeed = 0,
    tokens: Annotated[int | None, optional(min=1, help="Read in the whole run. Default: the preset's.")] = None,
    max_minutes: MaxMinutes = None,
    max_steps: MaxSteps = None,
    threads: Threads = None,
    device: DeviceName = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="Compile the forward pass; needs a compiler.")] = False,
    precision: Annotated[str, typer.Option(help="bf16, or fp32 where a CPU has no units for bf16.")] = "bf16",
    start: Annotated[Path | None, optional(help="Folder of the model to begin with. Default: fresh weights.")] = None,
    card: Card = False,
) -> None:
    """Train pond-text, the small language model, from nothing or from an earlier run's."""
    from millpond_lab.train.text.recipe import recipe_named as recipe_of
    from millpond_lab.train.text.train import train_text

    run, documents = train_text(
        out,
        data,
        recipe_of(preset),
        seed=seed,
        tokens=tokens,
        max_minutes=max_minutes,
        max_steps=max_steps,
        threads=threads,
        device=device,
        compiled=compiled,
        precision=precision,
        start=start,
    )
    if card:
        from millpond_lab.bench.common.machine import describe_machine
        from millpond_lab.train.text.card import write_card

        write_card(run, documents, out, data, hardware=describe_machine().hardware)
    typer.echo(f"{out}: {run.tokens:,} of {run.planned:,} tokens, {run.time_s / 60:.1f} minutes in all")


app.command("heavy-hitters")(heavy_hitters.heavy_hitters)
app.command("retain")(retain.retain)
app.command("pager")(pager.pager)
app.command("gate")(gate.gate)
app.command("calibrate-gate")(calibrate_gate.calibrate_gate)
app.command("duo")(duo.duo)
app.command("kvzap")(kvzap.kvzap)
app.command("import")(import_networks.import_networks)
