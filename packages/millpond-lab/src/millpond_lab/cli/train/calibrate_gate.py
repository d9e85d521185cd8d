"""`millpond train calibrate-gate`: trained gates that keep a target on other texts, without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import ModelOptions, Threads, expand_groups, optional
from millpond.errors import DataError, OptionError
from millpond_lab.cli.train.gate import BUNDLED, share_of_text
from millpond_lab.cli.train.texts_option import DATA_HELP, DataLength, texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from millpond.policy.trained.networks import Gates


@expand_groups
def calibrate_gate(
    *,
    data: Annotated[str, typer.Option(help=DATA_HELP, show_default=False)],
    out: Annotated[Path, typer.Option(help="The file to write (.safetensors).")],
    model: ModelOptions,
    gate: Annotated[str, typer.Option(help="Gates of 'millpond train gate' for this model, or bundled.")] = BUNDLED,
    target_keep: Annotated[str, typer.Option(help="Share of a prompt's entries to keep, as 10% or 0.1.")] = "10%",
    n_texts: Annotated[int, typer.Option("--texts", min=1, help="Texts that choose, and as many that judge.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0,
    window: Annotated[int, typer.Option(min=0, help="Newest entries of a prompt that always stay.")] = 16,
    length: DataLength = "256,1024",
    threads: Threads = None,
    card: Annotated[Path | None, optional(help="Card (.md) to which a section on the kept shares is added.")] = None,
) -> None:
    """Move the biases of trained gates so that texts like yours keep a share; seconds to minutes, no training."""
    from millpond_lab.train.gate.card import calibrate_gates, calibration_section

    if out.suffix != ".safetensors":
        raise OptionError(f"--out {out}: name a file that ends in .safetensors")
    if card is not None and not card.is_file():
        raise OptionError(f"--card {card}: there is no such file; name the card of the gates")
    target = share_of_text(target_keep)
    loaded, tokenizer = model.load()
    texts = texts_of(data, tokenizer, length, "")
    result = calibrate_gates(
        loaded,
        _gates(gate, loaded),
        texts,
        out,
        target=target,
        n_texts=n_texts,
        seed=seed,
        window=window,
        threads=threads,
    )
    if card is not None:
        with card.open("a", encoding="utf-8") as file:
            file.write(calibration_section(result, out.stat().st_size))
    typer.echo(
        f"{out}: biases moved by {result.shift:+.3f}; on {len(result.after)} held-out texts {min(result.after):.1%} to "
        f"{max(result.after):.1%} is kept, {sum(result.after) / len(result.after):.1%} in the mean"
    )


def _gates(given: str, model: PreTrainedModel) -> Gates:
    """The gates that --gate names, of this model."""
    from millpond.hf.retaining_heads import gates_finder
    from millpond.option_files import read_file
    from millpond.policy.trained.file import gates_of

    if given == BUNDLED:
        return gates_finder(model)(None)
    try:
        return gates_finder(model)(gates_of(read_file(given), given))
    except DataError as error:
        raise OptionError(f"--gate {given!r}: {error}") from None
