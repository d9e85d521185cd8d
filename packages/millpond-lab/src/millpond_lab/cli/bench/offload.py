"""`millpond bench offload`: a model beyond memory: ours, Accelerate, llama.cpp, DeepSpeed and FlexGen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from millpond.cli.console import errors
from millpond.cli.options import optional
from millpond.errors import OptionError, unknown
from millpond_lab.cli.bench.common import command_line, deliver
from millpond_lab.cli.options import Report


def offload(
    shape: Annotated[str, typer.Option(help="Shape of the model: 1.04B, 0.16B, opt-1.0B or opt-0.26B.")] = "1.04B",
    memory: Annotated[str, typer.Option(help="Memory of each engine, without Python and its libraries.")] = "512MiB",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    new: Annotated[int, typer.Option(min=2, help="New tokens of an answer.")] = 128,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Decoding steps of the others that are timed.")] = 10,
    our_steps: Annotated[
        int | None, optional(min=1, help="Decoding steps of ours that are timed behind the prompts. Default: all.")
    ] = None,
    cells: Annotated[
        str | None, optional(help="Cells, separated by commas; others in the report are kept. Default: all.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Keep the model here.")] = Path("build/offload-model"),
    accelerate: Annotated[
        Path, typer.Option(help="Folder with the package: pip install --no-deps --target FOLDER accelerate psutil.")
    ] = Path("build/accelerate"),
    llamacpp: Annotated[
        Path, typer.Option(help="Python of an environment with llama.cpp (benchmarks/engines/llamacpp_env.sh).")
    ] = Path("build/llamacpp/bin/python"),
    deepspeed: Annotated[
        Path, typer.Option(help="Folder with DeepSpeed (benchmarks/engines/deepspeed_env.sh).")
    ] = Path("build/deepspeed"),
    flexgen: Annotated[
        Path, typer.Option(help="Folder with FlexGen's code (benchmarks/engines/flexgen_env.sh).")
    ] = Path("build/flexgen"),
    measure: Annotated[bool, typer.Option("--measure", help="Measure the machine again first, about 30 s.")] = False,
    out: Report = None,
) -> None:
    """Time our sweep, Accelerate's disk offload, llama.cpp and FlexGen, all in one cap, and ours against its plan.

    DeepSpeed's ZeRO-3 and FlexGen are timed with them and may take more; their rows say how much.
    """
    from millpond.budget import parse_bytes
    from millpond_lab.bench.common.report import write_report
    from millpond_lab.bench.offload import deepspeed as deepspeed_cells
    from millpond_lab.bench.offload import flexgen as flexgen_cells
    from millpond_lab.bench.offload.llamacpp import check
    from millpond_lab.bench.offload.run import run
    from millpond_lab.bench.offload.settings import CELLS, OffloadSettings, Packages
    from millpond_lab.bench.offload.shapes import SHAPES
    from millpond_lab.bench.offload.table import markdown
    from millpond_lab.cli.bench.offload_picture import draw

    if shape not in SHAPES:
        raise unknown("shape", shape, SHAPES)
    chosen = list(CELLS) if cells is None else cells.split(",")
    for name in chosen:
        if name not in CELLS:
            raise unknown("cell", name, CELLS)
    if any(name.startswith("accelerate") for name in chosen) and not (accelerate / "accelerate").is_dir():
        raise OptionError(
            f"{accelerate} holds no package accelerate: pip install --no-deps --target {accelerate} accelerate psutil, "
            "or choose other --cells"
        )
    if any(name.startswith("llamacpp") for name in chosen):
        check(llamacpp)
    if any(name.startswith("deepspeed") for name in chosen):
        deepspeed_cells.check(deepspeed)
    if any(name.startswith("flexgen") for name in chosen):
        flexgen_cells.check(flexgen, shape)
    packages = Packages(accelerate=accelerate, llamacpp=llamacpp, deepspeed=deepspeed, flexgen=flexgen)
    settings = OffloadSettings(
        shape=shape,
        memory=parse_bytes(memory),
        prompt=prompt,
        new=new,
        threads=threads,
        steps=steps,
        our_steps=our_steps,
    )
    file = None if out is None else out / "offload.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.exists() else None

    def keep(data: dict[str, Any]) -> None:
        """A long run that is broken off leaves the cells that it has measured."""
        data["command"] = command_line(but="--cells")  # the report may hold cells of several runs
        if out is not None:
            write_report(out, "offload", data, markdown(data))

    with errors().status("measuring"):
        data = run(folder, packages, settings, chosen, before=before, measure=measure, keep=keep)
    deliver("offload", data, markdown(data), out)
    if out is not None:
        typer.echo(f"wrote {draw(data, out / 'offload.svg')}")
