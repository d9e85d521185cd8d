"""`millpond-vllm trial`: a user's own traffic, vLLM alone against settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from millpond import OptionError
from millpond_vllm import compat
from millpond_vllm.cli.engine_options import Force
from millpond_vllm.cli.model_name import with_model_folder
from millpond_vllm.cli.vllm_arguments import vllm_arguments
from millpond_vllm.platform_classes import engine_arguments
from millpond_vllm.trial.log import read_log
from millpond_vllm.trial.parent import Trial
from millpond_vllm.trial.rows import TrialRow, agreement, smallest
from millpond_vllm.trial.setting import LADDER, TrialSetting


def trial(
    context: typer.Context,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--setting",
            metavar="METHOD:BUDGET",
            help=f"A setting to try; give it several times. Default: {', '.join(LADDER)}.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        float, typer.Option(min=0, max=1, help="Mean share of an answer that must equal stock's from its beginning on.")
    ] = 0.9,
    out: Annotated[
        Path | None,
        typer.Option(help="Rows as JSON Lines; settings that are in it already are not run again.", show_default=False),
    ] = None,
    force: Force = False,
) -> None:
    """Answer the traffic of LOG by vLLM alone and by each setting, and compare answers, requests at once and speed.

    A line of LOG has messages or a prompt, and max_tokens. Other arguments are those of `vllm serve`.
    """
    log, given = _log_of(context.args)
    settings = [TrialSetting.parse(text) for text in dict.fromkeys(setting or LADDER)]
    n_requests = len(read_log(log))
    compat.check_version(force=force)

    def arguments(engine: dict[str, Any] | None) -> list[str]:
        if engine is None:
            return given
        return vllm_arguments(given, engine_arguments({**engine, "force": True} if force else engine))

    notes, console = Console(stderr=True), Console()
    notes.print(f"{n_requests} requests, {len(settings) + 1} settings")
    rows = Trial(log, given, arguments, out).run(settings, lambda name: notes.print(f"{name} ...", highlight=False))
    console.print(_table(rows))
    best = smallest(rows[1:], rows[0], target)
    if best is None:
        console.print(f"no setting reaches {target:.0%}: try larger budgets or another method", highlight=False)
    else:
        console.print(f"smallest setting that reaches {target:.0%}: [bold]{best.setting}[/]", highlight=False)


def _log_of(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the log, and the arguments of `vllm serve`."""
    if len(arguments) < 2 or any(part.startswith("-") for part in arguments[:2]):
        raise OptionError("give the log and the model first: millpond-vllm trial log.jsonl MODEL")
    return Path(arguments[0]), with_model_folder(arguments[1:])


def _table(rows: Sequence[TrialRow]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("setting", "kept", "equal prefix", "equal answers", "at once", "most", "tokens/s"):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    stock = rows[0]
    for row in rows:
        same = agreement(row, stock)
        table.add_row(
            row.setting,
            f"{row.kept:.0%}",
            f"{same.prefix:.0%}",
            f"{same.equal:.0%}",
            f"{row.at_once:.1f}",
            str(row.most_at_once),
            f"{row.tokens_per_s:.1f}",
        )
    return table
