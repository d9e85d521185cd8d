"""Options that commands of the lab share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millpond.cli.options import optional

BenchModelName = Annotated[
    str | None,
    optional(help="Trained weights: a name of `millpond models`, a folder or a GGUF file. Default: random ones."),
]
MethodName = Annotated[str, typer.Option(help="Method that chooses the kept entries: see 'millpond methods'.")]
Samples = Annotated[int, typer.Option(min=1, help="Samples of each task.")]
SampleSeed = Annotated[int, typer.Option(help="Seed of the samples and the intervals.")]
Report = Annotated[Path | None, optional(help="Write JSON and Markdown here.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny sizes: a check of the machinery, not a result.")]
WeightSeed = Annotated[int, typer.Option(help="Seed of weights, prompts and order.")]
