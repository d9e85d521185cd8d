"""Quality against bytes: a panel per task, a line per method over its budgets, the full cache as a dashed line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from millpond.errors import DataError
from millpond.inspector.palette import FAINT, INK, PAPER, colour_of, marker_of
from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.harness.summary import scored_text
from millpond_lab.evals.report.plots.style import calm, figure, heading, legend, title

COLUMNS = 3
PANEL = (3.6, 2.7)  #: inches


def quality(rows: Sequence[SummaryRow]) -> Figure:
    """Rows of one model, protocol and seed.

    Raises:
        DataError: no row has a score.
    """
    known = [row for row in rows if not math.isnan(row.score) and row.kv_bytes > 0]
    if not known:
        raise DataError("no row has a score and bytes, so there is no quality to draw")
    tasks = list(dict.fromkeys(row.task for row in known))
    columns = min(COLUMNS, len(tasks))
    lines = -(-len(tasks) // columns)
    made = figure(max(PANEL[0] * columns, 6.4), PANEL[1] * lines + 1.25)
    axes = made.subplots(lines, columns, squeeze=False).flatten()
    for axis, task in zip(axes, tasks, strict=False):
        _panel(axis, task, [row for row in known if row.task == task])
    for axis in axes[len(tasks) :]:
        axis.set_visible(False)
    first = known[0]
    heading(
        made,
        f"{first.model}: quality against bytes",
        f"protocol {first.protocol}, seed {first.seed}; bars are 95 % intervals"
        + (f"; {scored_text(known)} in each text" if scored_text(known) else "")
        + ("; hollow: entries are hidden, not freed" if any(row.masks_only for row in known) else ""),
    )
    legend(made, [_key(own[0]) for own in _candidates(known)], 6, handle=2.2)
    return made


def _panel(axis: Axes, task: str, rows: Sequence[SummaryRow]) -> None:
    lower = rows[0].better == "lower"
    title(axis, task.replace(":", " ") + (" (perplexity, lower is better)" if lower else ""))
    calm(axis)
    axis.set_xscale("log", base=2)
    for own in _candidates(rows):
        if own[0].method == "full":
            _full(axis, own[0])
        else:
            _line(axis, sorted(own, key=lambda row: row.kv_bytes))
    if not lower:
        axis.set_ylim(-0.04, 1.06)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _size(x)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("bytes of keys and values held", fontsize=8, color=FAINT)


def _full(axis: Axes, row: SummaryRow) -> None:
    axis.axhspan(row.low, row.high, color=INK, alpha=0.05, linewidth=0)
    axis.axhline(row.score, color=INK, linewidth=1.1, linestyle=(0, (5, 3)), zorder=1.5)
    axis.plot([row.kv_bytes], [row.score], "o", color=INK, markersize=4.5)


def _line(axis: Axes, rows: Sequence[SummaryRow]) -> None:
    colour = colour_of(rows[0].method)
    x, y = [row.kv_bytes for row in rows], [row.score for row in rows]
    below = [max(row.score - row.low, 0.0) for row in rows]
    above = [max(row.high - row.score, 0.0) for row in rows]
    axis.errorbar(
        x,
        y,
        yerr=[below, above],
        color=colour,
        linewidth=1.6,
        elinewidth=1.1,
        capsize=0,
        markersize=5.2,
        marker=marker_of(rows[0].method, rows[0].peer),
        markeredgecolor=colour if rows[0].masks_only else PAPER,
        markeredgewidth=1.2 if rows[0].masks_only else 0.7,
        markerfacecolor=PAPER if rows[0].masks_only else colour,
    )


def _key(row: SummaryRow) -> Line2D:
    colour = colour_of(row.method)
    name = (
        row.method
        + ("" if row.codec == "auto" else f", {row.codec}")
        + ("" if row.peer == "millpond" else f" ({row.peer})")
    )
    if row.method == "full":
        return Line2D([], [], color=colour, linestyle=(0, (5, 3)), linewidth=1.1, label=name)
    return Line2D(
        [],
        [],
        color=colour,
        linewidth=1.6,
        marker=marker_of(row.method, row.peer),
        markersize=5.2,
        label=name,
        markerfacecolor=PAPER if row.masks_only else colour,
    )


def _candidates(rows: Sequence[SummaryRow]) -> list[list[SummaryRow]]:
    """Rows of one candidate each, the full cache first, then in the order in which they came."""
    order = {_name(row): place for place, row in reversed(list(enumerate(rows)))}
    ranked = sorted(rows, key=lambda row: (row.method != "full", order[_name(row)]))
    return [list(own) for _, own in groupby(ranked, key=_name)]


def _name(row: SummaryRow) -> tuple[str, str, str]:
    return row.method, row.codec, row.peer


def _size(n_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024 or unit == "GiB":
            break
        n_bytes /= 1024
    return f"{n_bytes:.3g} {unit}"
