"""`millpond bench engines`: Millpond's engine compared with others on the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from millpond.cli.console import errors
from millpond.cli.options import optional
from millpond_lab.cli.bench.common import check_share, command_line, deliver, parse_cells, saved_model, with_given
from millpond_lab.cli.options import BenchModelName, Quick, Report, WeightSeed

OPENVINO, LLAMACPP = Path("build/openvino/bin/python"), Path("build/llamacpp/bin/python")


def engines(
    quick: Quick = False,
    model: BenchModelName = None,
    cells: Annotated[
        str | None, optional(help="Batch x prompt, separated by commas. Default: 1x2048,4x2048,1x8192,16x2048.")
    ] = None,
    new_tokens: Annotated[int | None, optional(min=1, help="Steps to time. Default: 32.")] = None,
    repeats: Annotated[int | None, optional(min=1, help="Repetitions in turns. Default: 3.")] = None,
    methods: Annotated[str, typer.Option(help="Our methods besides the full cache.")] = "h2o,ada",
    codec: Annotated[str, typer.Option(help="Codecs of our full cache besides bf16.")] = "int4",
    budget: Annotated[str, typer.Option(help="A share of the prompt; other engines evict to the same.")] = "20%",
    weights: Annotated[
        str | None, optional(help="Ours with packed weights besides: int8 or int4, of the model's GGUF file if any.")
    ] = None,
    only: Annotated[
        list[str] | None, optional(help="Only candidates with this in their labels; may be repeated.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each engine.")] = 2,
    seed: WeightSeed = 0,
    openvino: Annotated[
        Path, typer.Option(help="Python of an environment with OpenVINO GenAI (benchmarks/engines/openvino_env.sh).")
    ] = OPENVINO,
    llamacpp: Annotated[
        Path, typer.Option(help="Python of an environment with llama.cpp (benchmarks/engines/llamacpp_env.sh).")
    ] = LLAMACPP,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that an engine may take to start, to convert or load, or for a run.")
    ] = 3600.0,
    folder: Annotated[Path, typer.Option(help="Keep the models here.")] = Path("build/engines"),
    out: Report = None,
) -> None:
    """Time our engine, transformers, OpenVINO and llama.cpp in turns; an engine without an environment is skipped."""
    from millpond_lab.bench.common.report import write_report
    from millpond_lab.bench.engines import candidates
    from millpond_lab.bench.engines.run import QUICK, EnginesPlan, run
    from millpond_lab.bench.engines.table import markdown

    check_share(budget)
    saved = saved_model(model)
    plan = with_given(
        QUICK if quick else EnginesPlan(),
        cells=parse_cells(cells),
        new_tokens=new_tokens,
        repeats=repeats,
        threads=threads,
        seed=seed,
        shape=saved,
        timeout_s=timeout,
    )
    names, codecs = _names(methods), _names(codec)
    gguf = saved.gguf if saved else None
    everyone = candidates.ours(names, codecs, budget, weights, gguf)
    evicting = f"millpond, {names[0]} {budget}" if names else candidates.FULL
    everyone += candidates.stock() + candidates.openvino(openvino, budget, evicting)
    everyone += candidates.llamacpp(llamacpp, gguf, weights)
    everyone = candidates.only(everyone, only or ())
    name = "engines-quick" if quick else "engines"

    def keep(data: dict[str, Any]) -> None:
        """A long run that is broken off leaves the cells that it has measured."""
        data["command"] = command_line()
        if out is not None:
            write_report(out, name, data, markdown(data))

    with errors().status("measuring") as status:
        data = run(plan, everyone, folder, status.update, keep)
    deliver(name, data, markdown(data), out)


def _names(text: str) -> list[str]:
    """Names between commas; none in an empty text."""
    return [name.strip() for name in text.split(",") if name.strip()]
