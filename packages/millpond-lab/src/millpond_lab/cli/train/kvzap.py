"""`millpond train kvzap`: networks over hidden states for any model, on a frozen backbone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import ModelOptions, Threads, expand_groups, optional
from millpond.errors import OptionError, unknown
from millpond_lab.cli.train.texts_option import DATA_HELP, DataLength, Without, texts_of

if TYPE_CHECKING:
    from millpond_lab.train.kvzap.train import Network


@expand_groups
def kvzap(
    *,
    data: Annotated[str, typer.Option(help=DATA_HELP, show_default=False)],
    out: Annotated[Path, typer.Option(help="The file to write (.safetensors).")],
    model: ModelOptions,
    network: Annotated[str, typer.Option(help="linear (ridge regression), or mlp (GELU).")] = "linear",
    texts: Annotated[int, typer.Option(min=1, help="Texts that are read, each with its repetition.")] = 200,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens drawn of each text.")] = 500,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of an mlp over what was drawn.")] = 15,
    middle: Annotated[
        int | None, optional(min=1, help="Width of an mlp. Default: an eighth of the hidden size.")
    ] = None,
    check_texts: Annotated[int, typer.Option(min=1, help="Held-out texts behind the printed R2.")] = 16,
    ask: Annotated[str, typer.Option(help="What asks for the repetition.")] = "\n\nRepeat the previous context:\n\n",
    seed: Annotated[int, typer.Option(help="Seed of networks and texts.")] = 0,
    length: DataLength = "256,1024",
    without: Without = "",
    threads: Threads = None,
) -> None:
    """Train the networks of kvzap on a frozen model: minutes for a small one, on a CPU or a GPU."""
    from millpond_lab.train.kvzap.train import KVzapSettings, train_kvzap

    if out.suffix != ".safetensors":
        raise OptionError(f"--out {out}: name a file that ends in .safetensors")
    loaded, tokenizer = model.load()
    source = texts_of(data, tokenizer, length, without)
    ids: list[int] = tokenizer(ask, add_special_tokens=False)["input_ids"]
    settings = KVzapSettings(
        seed=seed,
        network=_network(network),
        texts=texts,
        tokens=tokens,
        check_texts=check_texts,
        epochs=epochs,
        middle=middle or 0,
    )
    result = train_kvzap(loaded, ids, source, out, settings, threads=threads)
    means = [sum(row) / len(row) for row in result.r2]
    low, half, high = result.quantiles
    typer.echo(
        f"{out}: {result.time_s / 60:.1f} minutes; R2 on {check_texts} held-out texts {sum(means) / len(means):.3f} "
        f"(layers {min(means):.3f} to {max(means):.3f}); a tenth of the labels is below {low:.2f}, half below "
        f"{half:.2f}, nine tenths below {high:.2f}"
    )


def _network(text: str) -> Network:
    networks: dict[str, Network] = {"linear": "linear", "mlp": "mlp"}
    if text not in networks:
        raise unknown("network", text, networks)
    return networks[text]
