"""`millpond train gate`: gates for any model, on a frozen backbone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import ModelOptions, Threads, expand_groups, optional
from millpond.errors import DataError, OptionError, unknown
from millpond_lab.cli.train.texts_option import DATA_HELP, DataLength, Without, texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from millpond.policy.trained.networks import Gates, RetainingHeads
    from millpond_lab.train.gate.objective import Teacher
    from millpond_lab.train.gate.shares import Acts

#: The values of --start for the heads and for the gates that come with the package.
BUNDLED, BUNDLED_GATE = "bundled", "bundled-gate"


@expand_groups
def gate(
    *,
    data: Annotated[str, typer.Option(help=DATA_HELP, show_default=False)],
    out: Annotated[Path, typer.Option(help="The file to write (.safetensors); its checkpoint is resumed.")],
    model: ModelOptions,
    target_keep: Annotated[str, typer.Option(help="Share of a prompt's entries to keep, as 10% or 0.1.")] = "10%",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole run, one text each.")] = 600,
    max_minutes: Annotated[float | None, optional(help="Stop after N minutes; the same command resumes.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and texts.")] = 0,
    teacher: Annotated[
        str | None,
        optional(
            help="Predictions are held to: self, the model with everything kept; text, the text itself. "
            "Default: self; text with --lora."
        ),
    ] = None,
    alpha: Annotated[float, typer.Option(min=0.0, help="Weight of the kept share's distance from the target.")] = 5.0,
    start: Annotated[
        str,
        typer.Option(
            help="Networks to begin with: a file of 'millpond train retain' or of this command; or those of the "
            "package, bundled for its retaining heads and bundled-gate for its gates."
        ),
    ] = "",
    hidden: Annotated[
        int | None, optional(min=1, help="Width of the networks. Default: twice the hidden size; from 512 on 1,024.")
    ] = None,
    window: Annotated[int, typer.Option(min=0, help="Newest entries of a prompt that always stay.")] = 16,
    whole: Annotated[
        bool, typer.Option("--global", help="Tokens of a prompt look at all of it, so it must be read in one pass.")
    ] = False,
    acts: Annotated[
        str, typer.Option(help="Flags act inside a prompt (the paper), or at its end: see attention_gate's option.")
    ] = "prompt",
    lora: Annotated[
        int | None,
        optional(min=1, help="Rank of an adapter of the attention projections, trained beside the gates (the paper)."),
    ] = None,
    lr: Annotated[float | None, optional(help="Highest learning rate. Default: 1e-3; 3e-4 for large models.")] = None,
    length: DataLength = "256,1024",
    without: Without = "",
    threads: Threads = None,
    card: Annotated[bool, typer.Option("--card", help="Write a card of the file, with the ending .md.")] = False,
) -> None:
    """Train the gates of attention_gate on a frozen model: minutes for the bundled one, on a CPU or a GPU."""
    from millpond_lab.train.gate.train import defaults_of, start_of, train_gate

    if out.suffix != ".safetensors":
        raise OptionError(f"--out {out}: name a file that ends in .safetensors")
    target = share_of_text(target_keep)
    chosen, where = _teacher(teacher or ("text" if lora else "self")), _acts(acts)
    loaded, tokenizer = model.load()
    texts = texts_of(data, tokenizer, length, without)
    usual, heads = defaults_of(loaded), _heads(start, loaded)
    settings = replace(
        usual,
        seed=seed,
        steps=steps,
        lr=lr or usual.lr,
        target=target,
        alpha=alpha,
        teacher=chosen,
        hidden=hidden or usual.hidden,
        window=window,
        start=start_of(heads),
        attention="global" if whole else "causal",
        acts=where,
        lora=lora or 0,
    )
    result = train_gate(loaded, texts, out, settings, start=heads, max_minutes=max_minutes, threads=threads)
    if card:
        from millpond_lab.bench.common.machine import describe_machine
        from millpond_lab.train.gate.card import write_card

        write_card(result, out, name=model.model, hardware=describe_machine().hardware)
    typer.echo(
        f"{out}: step {result.run.step:,} of {steps:,}, {result.run.time_s / 60:.1f} minutes in all; on held-out texts "
        f"{min(result.shares):.1%} to {max(result.shares):.1%} is kept, and {result.same:.1%} of the predictions stay"
    )


def share_of_text(text: str) -> float:
    """A share such as 10% or 0.1, between 0 and 1."""
    number, percent = (text[:-1], 100.0) if text.endswith("%") else (text, 1.0)
    try:
        share = float(number) / percent
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise OptionError(f"--target-keep {text!r}: give a share of the entries between 0 and 1, such as 10% or 0.1")
    return share


def _teacher(text: str) -> Teacher:
    teachers: dict[str, Teacher] = {"self": "self", "text": "text"}
    if text not in teachers:
        raise unknown("teacher", text, teachers)
    return teachers[text]


def _acts(text: str) -> Acts:
    places: dict[str, Acts] = {"prompt": "prompt", "end": "end"}
    if text not in places:
        raise unknown("place where flags act", text, places)
    return places[text]


def _heads(start: str, model: PreTrainedModel) -> RetainingHeads | Gates | None:
    """The networks that --start names; None for none."""
    from millpond.hf.retaining_heads import gates_finder, heads_finder
    from millpond.option_files import read_file
    from millpond.policy.trained.file import about_file, gates_of, heads_of

    if not start:
        return None
    if start in (BUNDLED, BUNDLED_GATE):
        return (heads_finder if start == BUNDLED else gates_finder)(model)(None)
    try:
        if about_file(start)["kind"] == "gate":
            return gates_finder(model)(gates_of(read_file(start), start))
        return heads_finder(model)(heads_of(read_file(start), start))
    except DataError as error:
        raise OptionError(f"--start {start!r}: {error}") from None
