"""`millpond train pager`: a predictor for the rules of the prefix cache, fitted to traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from millpond.errors import OptionError, unknown


def pager(
    trace: Annotated[
        list[str], typer.Option(metavar="KIND:PATH", help="mooncake or agents, and a path; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write (.safetensors).")],
    shares: Annotated[
        str, typer.Option(help="Sizes of the cache as shares of a trace's distinct pages, separated by commas.")
    ] = "0.01,0.03,0.1",
    label: Annotated[
        str,
        typer.Option(
            help="What a bit says of a page: belady, the best rule evicts it before its next use; phase, the next "
            "phase does not use it (for mark_predict)."
        ),
    ] = "belady",
) -> None:
    """Fit the predictor of 'serve --prefix-cache learned' to traces: seconds to a few minutes."""
    from millpond.cache.paging.predictor import Label, save_weights
    from millpond_lab.bench.paging.trace_paths import read_paths
    from millpond_lab.train.pager.fit import fit_pager

    if out.suffix != ".safetensors":
        raise OptionError(f"--out {out} must end in .safetensors")
    if label not in get_args(Label):
        raise unknown("label", label, get_args(Label))
    kind: Label = "phase" if label == "phase" else "belady"
    fitted = fit_pager([read_paths(name) for name in trace], _shares(shares), kind)
    names = ", ".join(name.rpartition("/")[2].rpartition(":")[2] for name in trace)
    save_weights(out, fitted.weights, f"{names} at {shares} of their pages", kind)
    typer.echo(
        f"{out}: {fitted.accesses:,} accesses, {fitted.discards:.1%} to discard; {fitted.correct:.1%} predicted right, "
        "on the data of the fit"
    )


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise OptionError(f"--shares {text!r} must be numbers above 0 and at most 1, separated by commas")
    return shares
