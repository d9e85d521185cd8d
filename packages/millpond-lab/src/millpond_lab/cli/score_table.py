"""The tables of an evaluation, best first within each task."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from millpond.cli.console import size
from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.harness.store import SAMPLES
from millpond_lab.evals.harness.summary import asked_text, candidate_name, score_text


def score_table(rows: list[SummaryRow]) -> Group:
    """One table for each task and protocol, in the order in which those first came, the best row first in each."""
    codecs = len({row.codec for row in rows}) > 1
    widest = max((len(candidate_name(row)) for row in rows), default=0)
    return Group(*(_part(group, codecs, widest) for group in _groups(rows)))


def _part(group: list[SummaryRow], codecs: bool, widest: int) -> Table:
    asked = asked_text(group, "questions")
    title = f"\n[bold]{escape(group[0].task)}[/]  [dim]{group[0].protocol}, {asked}[/]"
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("method", min_width=min(widest, 18), overflow="fold")
    for heading in ("budget", *(["codec"] if codecs else [])):
        table.add_column(heading, no_wrap=True, min_width=6)
    for heading, width in (("score", 9), ("95 %", 14), ("kept", 4), ("KV held", 9), ("failures", 8)):
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    for row in group:
        score, interval = score_text(row)
        table.add_row(
            escape(candidate_name(row)),
            row.budget or "all",
            *([row.codec] if codecs else []),
            score,
            f"[dim]{interval}[/]",
            f"{row.kept_share:.0%}",
            size(row.kv_bytes),
            f"[red]{row.failures}[/]" if row.failures else "0",
        )
    return table


def failure_note(rows: list[SummaryRow], out: Path) -> str:
    """What a person must know before believing the scores in the folder; "" if every question was answered."""
    failed = [row for row in rows if row.failures]
    if not failed:
        return ""
    worst = max(failed, key=lambda row: row.failures / row.n)
    total, asked = sum(row.failures for row in failed), sum(row.n for row in rows)
    return (
        f"{total} of {asked} questions could not be answered and count as wrong (perplexity leaves them out); most in "
        f"{worst.task} with {worst.method} ({worst.failures} of {worst.n}). {out / SAMPLES} says why under failure"
    )


def _groups(rows: list[SummaryRow]) -> Iterator[list[SummaryRow]]:
    order = {key: place for place, key in enumerate(dict.fromkeys(map(_group_of, rows)))}
    for _, group in groupby(sorted(rows, key=lambda row: order[_group_of(row)]), key=_group_of):
        yield sorted(group, key=_badness)


def _group_of(row: SummaryRow) -> tuple[str, str]:
    return row.task, row.protocol


def _badness(row: SummaryRow) -> tuple[bool, float]:
    """Low is good; no score at all comes last."""
    none = row.score != row.score
    return none, 0.0 if none else row.score if row.better == "lower" else -row.score
