"""`millpond-vllm check`: what eviction can do for a model in the installed vLLM."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from millpond import UnsupportedModelError
from millpond_vllm import compat
from millpond_vllm.cli.engine_options import (
    Budget,
    Chunk,
    Force,
    Method,
    MethodOptions,
    Prefill,
    Recent,
    engine_settings,
)
from millpond_vllm.cli.model_name import with_model_folder
from millpond_vllm.cli.vllm_arguments import vllm_arguments
from millpond_vllm.event_times import CHUNK
from millpond_vllm.model_report import KVBytes, ModelReport, method_refusals, report
from millpond_vllm.platform_classes import engine_arguments

_EXIT_REFUSED = 1


def check(
    context: typer.Context,
    method: Method = "snapkv",
    budget: Budget = "20%",
    recent: Recent = None,
    prefill: Prefill = "auto",
    chunk: Chunk = CHUNK,
    force: Force = False,
    option: MethodOptions = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text whose KV bytes are counted.")] = 8192,
) -> None:
    """Say what works for a model here, which share of its KV bytes can be evicted, and what is refused and why.

    Other arguments are those of `vllm serve`. No weights are read: what only loaded layers show is checked when the
    server starts. The exit code is 1 where it cannot run.
    """
    given = engine_settings(method, budget, recent, prefill, chunk, force, option)
    console = Console()
    arguments = vllm_arguments(with_model_folder(context.args), engine_arguments(given))
    try:
        compat.vllm_version()
        config = compat.serve_config(arguments)
    except UnsupportedModelError as error:
        _refuse(console, [str(error)])
    found = report(config, given, tokens)
    console.print(_overview(found))
    for change in found.changes:
        console.print(f"  [yellow]{method}[/] here, {change.part}: {escape(change.says)}", soft_wrap=True)
    console.print()
    console.print(_methods())
    console.print()
    if found.refusals:
        _refuse(console, found.refusals)
    console.print(f"[green]works:[/] millpond-vllm serve --method {method} --budget {budget}", soft_wrap=True)


def _refuse(console: Console, reasons: list[str]) -> NoReturn:
    for reason in reasons:
        console.print(f"[bold red]refused:[/] {escape(reason)}", soft_wrap=True, highlight=False)
    raise typer.Exit(_EXIT_REFUSED)


def _overview(found: ModelReport) -> Table:
    table = _plain("", "")
    tested = found.version.split("+")[0] in compat.TESTED
    table.add_row("vLLM", f"{found.version} ({'tested' if tested else 'not tested'})")
    table.add_row("attention backend", found.backend)
    table.add_row("tokens of a block", str(found.block))
    table.add_row("layers", ", ".join(f"{n} {kind}" for kind, n in found.layers.items()))
    table.add_row(f"KV bytes of {found.bytes.tokens:,} tokens", _size(found.bytes.full + found.bytes.window))
    table.add_row("of them can be evicted", f"{found.bytes.share:.0%}")
    table.add_row("of them stay", _stay(found.bytes))
    return table


def _stay(given: KVBytes) -> str:
    whole, held = given.full + given.window, given.kept + given.window
    return f"{_size(held)} ({held / whole:.0%})" if whole else "0 B"


def _methods() -> Table:
    table = _plain("method", "acts on blocks")
    for name, reason in method_refusals().items():
        table.add_row(name, "[green]yes[/]" if reason is None else f"no: {escape(reason)}")
    return table


def _plain(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(headings))
    for heading in headings:
        table.add_column(heading)
    return table


def _size(n_bytes: float) -> str:
    """Return bytes in binary units, as Millpond writes them."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"
