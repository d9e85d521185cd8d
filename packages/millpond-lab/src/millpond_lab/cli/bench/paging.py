"""`millpond bench paging`: hit rates of paging rules on traces, and what a victim costs."""

from __future__ import annotations

from typing import Annotated

import typer

from millpond.cli.console import errors
from millpond.cli.options import optional
from millpond.errors import OptionError, unknown
from millpond_lab.cli.bench.common import command_line, deliver
from millpond_lab.cli.options import Report


def paging(
    trace: Annotated[
        list[str], typer.Option(metavar="KIND:PATH", help="mooncake or agents, and a path; may be repeated.")
    ],
    pages: Annotated[str, typer.Option(help="Sizes of the cache in pages, separated by commas.")] = "2000,6000,20000",
    rules: Annotated[
        str | None,
        optional(help="Rules, separated by commas; 'bits': some that are given right or wrong bits. Default: all."),
    ] = None,
    cost_pages: Annotated[int, typer.Option(min=0, help="Size at which rules are timed; 0: not.")] = 100_000,
    out: Report = None,
) -> None:
    """Replay traces through the paging rules, and time their victims in a full cache."""
    from millpond.cache.paging import list_paging_rules
    from millpond_lab.bench.paging.candidates import WITH_BITS
    from millpond_lab.bench.paging.run import run
    from millpond_lab.bench.paging.table import paging_markdown

    known = list_paging_rules()
    chosen = known if rules is None else ["lru", *WITH_BITS] if rules == "bits" else rules.split(",")
    for name in chosen:
        if name not in known and name not in WITH_BITS:
            raise unknown("paging rule", name, known)
    with errors().status("replaying") as status:
        data = run(trace, _sizes(pages), chosen, cost_pages=cost_pages, progress=status.update)
    data["command"] = command_line()
    deliver("paging-bits" if rules == "bits" else "paging", data, paging_markdown(data), out)


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise OptionError(f"--pages {text!r} must be whole numbers from 1, separated by commas, such as 2000,6000")
    return [int(part) for part in parts]
