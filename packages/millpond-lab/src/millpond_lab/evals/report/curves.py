"""Curves of a method's share of the full cache's score over budgets, from rows of summaries; no drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from millpond.budget import Budget
from millpond.errors import DataError
from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.report.kvpress_equivalents import is_press
from millpond_lab.evals.report.leaderboard import MASKED, PROTOCOLS, markdown_table, span


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate at one budget, over all tasks.

    Attributes:
        share: mean over tasks of score over the full cache's score. low, high: its 95 % interval.
        held: mean bytes held, over those that a full cache holds.
        masks_only: entries were hidden, not freed. n, failures: questions, and those that failed.
    """

    budget: str
    share: float
    low: float
    high: float
    held: float
    masks_only: bool
    n: int
    failures: int


@dataclass(frozen=True, slots=True)
class Curve:
    """A candidate over budgets, smallest first, in one protocol."""

    method: str
    peer: str
    protocol: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class CurvePanel:
    """A method in one protocol with its references; None where there are no results of that."""

    own: Curve
    press: Curve | None
    window: Curve | None
    oracle: Curve | None

    @property
    def beside(self) -> list[Curve]:
        """The curves but the method's own."""
        return [curve for curve in (self.press, self.window, self.oracle) if curve is not None]


def curves_of(rows: Sequence[SummaryRow]) -> list[Curve]:
    """The curves in rows of one model and seed, of tasks where more is better.

    Budgets at which a task is missing are left out; tasks are those that the full cache was asked.

    Raises:
        DataError: rows of several models or seeds, or no row of the full cache.
    """
    settings = {(row.model, row.seed) for row in rows}
    if len(settings) > 1:
        raise DataError(f"curves are drawn of one model and seed, and these rows have {sorted(settings)}")
    scored = [row for row in rows if row.better == "higher" and not math.isnan(row.score)]
    cells: dict[tuple[str, str, str], dict[str, dict[str, SummaryRow]]] = {}
    for row in scored:
        by_budget = cells.setdefault((row.method, row.peer, row.protocol), {})
        by_budget.setdefault(row.budget, {})[row.task] = row
    made = []
    for (method, peer, protocol), by_budget in cells.items():
        full = cells.get(("full", "millpond", protocol), {}).get("", {})
        if not full:
            raise DataError(f"no row of the full cache for {method} ({protocol}); run full on the same tasks")
        points = tuple(
            _point(budget, by_budget[budget], full)
            for budget in sorted(filter(None, by_budget), key=lambda text: Budget.parse(text).amount)
            if by_budget[budget].keys() >= full.keys()
        )
        if points:
            made.append(Curve(method, peer, protocol, points))
    return made


def panels(curves: Sequence[Curve], method: str) -> dict[str, CurvePanel]:
    """What the page of a method shows, by protocol; empty where there are no results of it.

    The method stands with its defaults, or else with the first options that it was run with.
    """
    found = {}
    for protocol in dict.fromkeys(curve.protocol for curve in curves):
        here = [curve for curve in curves if curve.protocol == protocol]
        ours = {curve.method: curve for curve in here if curve.peer == "millpond"}
        own = ours.get(method) or next((c for name, c in ours.items() if name.partition(":")[0] == method), None)
        if own is not None:
            press = next((c for c in here if is_press(c.method, method, c.peer)), None)
            references = [None if name == own.method else ours.get(name) for name in ("window", "oracle")]
            found[protocol] = CurvePanel(own, press, *references)
    return found


def _point(budget: str, rows: Mapping[str, SummaryRow], full: Mapping[str, SummaryRow]) -> Point:
    """Tasks are drawn apart, so the half-widths of their intervals add up in squares. The full cache is taken as is."""
    own, whole = [rows[task] for task in full], [row.score or math.nan for row in full.values()]
    share = _mean([row.score / of for row, of in zip(own, whole, strict=True)])
    below = math.hypot(*((row.score - row.low) / of for row, of in zip(own, whole, strict=True))) / len(own)
    above = math.hypot(*((row.high - row.score) / of for row, of in zip(own, whole, strict=True))) / len(own)
    return Point(
        budget,
        share,
        max(share - below, 0.0),
        share + above,
        held=_mean([row.kv_bytes for row in own]) / (_mean([row.full_kv_bytes for row in own]) or math.nan),
        masks_only=any(row.masks_only for row in own),
        n=sum(row.n for row in own),
        failures=sum(row.failures for row in own),
    )


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


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


def pareto_front(rows: Iterable[SummaryRow]) -> list[SummaryRow]:
    """Those rows of one task that are better than every row of fewer or as many bytes, ascending in bytes."""
    best = -math.inf
    found = []
    for row in sorted(rows, key=lambda row: (row.kv_bytes, -quality_of(row))):
        if quality_of(row) > best:
            best = quality_of(row)
            found.append(row)
    return found


def quality_of(row: SummaryRow) -> float:
    """The score, turned so that more is better."""
    return -row.score if row.better == "lower" else row.score
