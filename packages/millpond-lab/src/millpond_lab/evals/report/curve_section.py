"""The section "Quality" of a method's page, from its curves. Pure, so that a check can compare the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.report.curves import Curve, CurvePanel, Point
from millpond_lab.evals.report.leaderboard import MASKED, PROTOCOLS, markdown_table, span


def quality_section(panels: Mapping[str, CurvePanel], rows: Sequence[SummaryRow], picture: str) -> str:
    """Picture, numbers and how they came about; "" without results.

    Args:
        panels: by protocol. rows: those that the curves were made of. picture: a link to it.
    """
    if not panels:
        return ""
    own = next(iter(panels.values())).own.method
    body = [
        [
            protocol,
            budget,
            *_cells(panel.own, budget),
            *_cells(panel.press, budget),
            *_share(panel.window, budget),
            *_share(panel.oracle, budget),
        ]
        for protocol, panel in panels.items()
        for budget in (point.budget for point in panel.own.points)
    ]
    presses = [panel.press for panel in panels.values() if panel.press is not None]
    theirs = f"`{presses[0].method}` ({presses[0].peer})" if presses else "no counterpart"
    heads = ["protocol", "budget", f"`{own}`", "bytes of full", theirs, "bytes of full", "window", "oracle"]
    used = [place for place in range(len(heads)) if any(line[place] != "–" for line in body)]
    table = markdown_table([heads[i] for i in used], [[line[i] for i in used] for line in body])
    return f"## Quality\n\n![Quality of {own} over budgets]({picture})\n\n{table}\n{_note(panels, rows)}\n"


def _note(panels: Mapping[str, CurvePanel], rows: Sequence[SummaryRow]) -> str:
    used = [row for row in rows if row.protocol in panels and row.method == "full" and row.peer == "millpond"]
    tasks = ", ".join(f"`{task.replace(':', ' ')}`" for task in dict.fromkeys(row.task for row in used))
    asked = span(row.n for row in used)
    parts = [
        f"`{used[0].model}`: the mean over {tasks}, {asked} questions each, seed {used[0].seed}, as a share of the "
        "full cache's score, with its 95 % interval; bytes are those held when the answer begins.",
        *(f"{protocol}: {PROTOCOLS.get(protocol, protocol).split(';')[0]}." for protocol in panels),
    ]
    shown = [curve for panel in panels.values() for curve in (panel.own, *panel.beside)]
    if any(point.masks_only for curve in shown for point in curve.points):
        parts.append(f"{MASKED} hides entries and keeps them in memory.")
    parts += [_failed(curve) for curve in shown if any(point.failures for point in curve.points)]
    return " ".join(parts)


def _failed(curve: Curve) -> str:
    counts = ", ".join(f"{p.failures:,} of {p.n:,} at {p.budget}" for p in curve.points if p.failures)
    return f"`{curve.method}` ({curve.protocol}) failed on {counts}; that counts as wrong."


def _cells(curve: Curve | None, budget: str) -> tuple[str, str]:
    point = _at(curve, budget)
    if point is None:
        return "–", "–"
    text = f"{point.share:.1%} ({point.low:.1%} to {point.high:.1%})"
    return text, f"{point.held:.1%}" + (f" {MASKED}" if point.masks_only else "")


def _share(curve: Curve | None, budget: str) -> tuple[str]:
    point = _at(curve, budget)
    return ("–" if point is None else f"{point.share:.1%}",)


def _at(curve: Curve | None, budget: str) -> Point | None:
    return next((p for p in curve.points if p.budget == budget), None) if curve else None
