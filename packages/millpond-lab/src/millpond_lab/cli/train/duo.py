"""`millpond train duo`: which heads of a model are retrieval heads, on a frozen backbone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import ModelOptions, Threads, expand_groups, optional
from millpond.errors import OptionError
from millpond_lab.cli.train.texts_option import DATA_HELP, DataLength, Without, pair_of, texts_of

if TYPE_CHECKING:
    from millpond_lab.train.retain.texts import Texts


@expand_groups
def duo(
    *,
    out: Annotated[Path, typer.Option(help="The file to write (.json); its checkpoint is resumed.")],
    model: ModelOptions,
    data: Annotated[
        str, typer.Option(help=f"'spans' for random tokens of which spans are said again; or {DATA_HELP}")
    ] = "spans",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole run, one text each.")] = 300,
    max_minutes: Annotated[float | None, optional(help="Stop after N minutes; the same command resumes.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0,
    penalty: Annotated[float, typer.Option(help="Weight of the mean number of all heads, above 0.")] = 0.5,
    recent: Annotated[int, typer.Option(min=0, help="Newest entries that a streaming head sees.")] = 64,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 0.02,
    length: DataLength = "256,1024",
    without: Without = "",
    threads: Threads = None,
) -> None:
    """Train one number per KV head, for duo_attention: heads that need distant entries have high ones."""
    from millpond.hf.model_profile import ModelProfile
    from millpond_lab.train.duo import SPANS, DuoSettings, RepeatedSpans, train_duo

    if out.suffix != ".json":
        raise OptionError(f"--out {out}: name a file that ends in .json")
    settings = DuoSettings(seed=seed, steps=steps, lr=lr, penalty=penalty, recent=recent)
    loaded, tokenizer = model.load()
    texts: Texts
    if data == SPANS:
        if without:
            raise OptionError("--without is of --data recall; leave it out")
        special = {*ModelProfile.of(loaded).end_tokens, *tokenizer.all_special_ids}
        texts = RepeatedSpans(ModelProfile.of(loaded).vocabulary, special, *pair_of(length, "--length", "256,1024"))
    else:
        texts = texts_of(data, tokenizer, length, without)
    result = train_duo(loaded, texts, out, settings, max_minutes=max_minutes, threads=threads)
    numbers = [number for row in result.numbers for number in row]
    typer.echo(
        f"{out}: step {result.run.step:,} of {steps:,}, {result.run.time_s / 60:.1f} minutes in all; "
        f"{sum(number > 0.5 for number in numbers)} of {len(numbers)} heads are above 0.5"
    )
