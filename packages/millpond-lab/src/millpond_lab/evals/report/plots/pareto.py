"""Eviction and bits together: quality against bytes, every setting a point, those that nothing beats joined."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from millpond.errors import DataError
from millpond.inspector.palette import FAINT, INK, PAPER, colour_of
from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.harness.summary import scored_text
from millpond_lab.evals.report.curves import pareto_front
from millpond_lab.evals.report.plots.style import calm, figure, heading, legend, title

PANEL = (7.2, 3.4)  #: inches
#: Markers by place in the order of the budgets.
BUDGETS = ("o", "s", "^", "D", "v", "P")


def pareto(rows: Sequence[SummaryRow]) -> Figure:
    """Rows of one model, protocol and seed.

    Raises:
        DataError: no row has a score.
    """
    known = [row for row in rows if not math.isnan(row.score) and row.kv_bytes > 0 and row.full_kv_bytes > 0]
    if not known:
        raise DataError("no row has a score and bytes, so there is nothing to set against each other")
    tasks = list(dict.fromkeys(row.task for row in known))
    budgets = list(dict.fromkeys(row.budget for row in known))
    made = figure(PANEL[0], PANEL[1] * len(tasks) + 1.0)
    axes = made.subplots(len(tasks), 1, squeeze=False).flatten()
    for axis, task in zip(axes, tasks, strict=True):
        _panel(axis, task, [row for row in known if row.task == task], budgets)
    scored = f", {scored_text(known)}" if scored_text(known) else ""
    heading(
        made,
        f"{known[0].model}: eviction x bits",
        f"protocol {known[0].protocol}, seed {known[0].seed}{scored}; "
        "the line joins the settings that no other beats in both",
    )
    settings = dict.fromkeys((row.method, row.budget) for row in known)
    legend(made, [_key(method, budget, budgets) for method, budget in settings], 4, handle=1.4)
    return made


def _panel(axis: Axes, task: str, rows: Sequence[SummaryRow], budgets: Sequence[str]) -> None:
    lower = rows[0].better == "lower"
    title(axis, task.partition(":")[0] + (" (perplexity, lower is better)" if lower else ""))
    calm(axis)
    axis.set_xscale("log", base=2)
    for row in rows:
        x, mark = _share(row), BUDGETS[budgets.index(row.budget) % len(BUDGETS)]
        axis.plot([x], [row.score], mark, color=colour_of(row.method), markersize=5, markeredgecolor=PAPER, zorder=3)
    best = pareto_front(rows)
    axis.plot([_share(r) for r in best], [r.score for r in best], color=FAINT, linewidth=1.0, zorder=1.5)
    for row in best:
        axis.annotate(
            row.codec,
            (_share(row), row.score),
            (0, -7 if lower else 6),
            textcoords="offset points",
            rotation=30,
            ha="right" if lower else "left",
            va="top" if lower else "bottom",
            fontsize=7,
            color=INK,
        )
    axis.margins(x=0.08, y=0.18)
    if not lower:
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}" if x >= 0.01 else f"{x:.1%}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("bytes of keys and values held, of a full cache in the model's numbers", fontsize=8, color=FAINT)


def _share(row: SummaryRow) -> float:
    return row.kv_bytes / row.full_kv_bytes


def _key(method: str, budget: str, budgets: Sequence[str]) -> Line2D:
    mark = BUDGETS[budgets.index(budget) % len(BUDGETS)]
    return Line2D(
        [], [], linestyle="", marker=mark, markersize=5, color=colour_of(method), label=f"{method} {budget}".rstrip()
    )
