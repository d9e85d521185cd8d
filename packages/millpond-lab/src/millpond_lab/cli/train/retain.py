"""`millpond train retain`: retaining heads for any model, on a frozen backbone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import ModelOptions, Threads, expand_groups, optional
from millpond.errors import OptionError, unknown
from millpond_lab.cli.train.texts_option import DATA_HELP, DataLength, Without, pair_of, texts_of

if TYPE_CHECKING:
    from millpond_lab.train.retain.features import Label


@expand_groups
def retain(
    *,
    data: Annotated[str, typer.Option(help=DATA_HELP, show_default=False)],
    out: Annotated[Path, typer.Option(help="The file to write (.safetensors); its checkpoint is resumed.")],
    model: ModelOptions,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole run, one text each.")] = 1200,
    max_minutes: Annotated[float | None, optional(help="Stop after N minutes; the same command resumes.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and texts.")] = 0,
    label: Annotated[
        str, typer.Option(help="What heads learn: log_prob, or logit before the softmax (the paper's code).")
    ] = "log_prob",
    width: Annotated[
        int | None, optional(min=1, help="Width of the networks. Default: twice the hidden size; from 512 on 1,024.")
    ] = None,
    lr: Annotated[float | None, optional(help="Highest learning rate. Default: 3e-3; 5e-4 for large models.")] = None,
    chunked: Annotated[
        str | None,
        optional(help="BUDGET,CHUNK: read every other text with eviction, for prefill=chunks. Default: in full."),
    ] = None,
    length: DataLength = "256,1024",
    without: Without = "",
    threads: Threads = None,
    card: Annotated[bool, typer.Option("--card", help="Write a card of the file, with the ending .md.")] = False,
) -> None:
    """Train the retaining heads of locret on a frozen model: minutes for the bundled one, on a CPU or a GPU."""
    from millpond_lab.train.retain.train import RetainSettings, defaults_of, train_retain

    budget, chunk = pair_of(chunked, "--chunked", "205,256") if chunked else (0, 0)
    if out.suffix != ".safetensors":
        raise OptionError(f"--out {out}: name a file that ends in .safetensors")
    loaded, tokenizer = model.load()
    texts = texts_of(data, tokenizer, length, without)
    usual_width, usual_lr = defaults_of(loaded)
    settings = RetainSettings(
        seed=seed,
        label=_label(label),
        steps=steps,
        width=width or usual_width,
        lr=lr or usual_lr,
        budget=budget,
        chunk=chunk,
    )
    result = train_retain(loaded, texts, out, settings, max_minutes=max_minutes, threads=threads)
    if card:
        from millpond_lab.bench.common.machine import describe_machine
        from millpond_lab.train.retain.train import write_card

        write_card(result, out, name=model.model, hardware=describe_machine().hardware)
    mean = sum(map(sum, result.overlaps)) / sum(map(len, result.overlaps))
    typer.echo(
        f"{out}: step {result.run.step:,} of {steps:,}, {result.run.time_s / 60:.1f} minutes in all, "
        f"{mean:.2f} of the best tenth on held-out texts"
    )


def _label(text: str) -> Label:
    labels: dict[str, Label] = {"log_prob": "log_prob", "logit": "logit"}
    if text not in labels:
        raise unknown("label", text, labels)
    return labels[text]
