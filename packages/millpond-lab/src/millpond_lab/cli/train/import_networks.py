"""`millpond train import`: networks that others released, as files of the methods kvzap and fastkvzip."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millpond.cli.options import ModelOptions, expand_groups
from millpond.errors import OptionError


@expand_groups
def import_networks(
    source: Annotated[
        Path,
        typer.Argument(help="Folder of KVzap networks (config.json, model.safetensors), or gates of Fast KVzip (.pt)."),
    ],
    *,
    out: Annotated[Path, typer.Option(help="The file to write (.safetensors).")],
    model: ModelOptions,
) -> None:
    """Make a file of kvzap or fastkvzip from released networks, after a check against the model; runs no code of it."""
    from millpond.hf.calibration.load import model_mark
    from millpond.policy.trained.file import save_heads
    from millpond.policy.trained.hidden_networks import HiddenNetworks
    from millpond.policy.trained.imported import imported
    from millpond.policy.trained.kinds import kind_of_network
    from millpond_lab.train.kvzap.labels import shapes_of

    if out.suffix != ".safetensors":
        raise OptionError(f"--out {out}: name a file that ends in .safetensors")
    loaded, _ = model.load()
    layers = imported(source, shapes_of(loaded))
    save_heads(HiddenNetworks(layers, model_mark(loaded), type(loaded).__name__, {"from": source.name}), out)
    typer.echo(f"{out}: {len(layers)} networks of the kind {kind_of_network(layers[0]).name}")
