"""The curve of one method: share of the full cache's score over budgets, a panel per protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from millpond.budget import Budget
from millpond.inspector.palette import FAINT, INK, PAPER, colour_of
from millpond_lab.evals.report.curves import Curve, CurvePanel
from millpond_lab.evals.report.plots import style

PANEL = (3.3, 2.6)  #: inches


def curve_picture(panels: Mapping[str, CurvePanel]) -> Figure:
    """One method, by protocol; the full cache is the dashed line at 100 %."""
    made = style.figure(PANEL[0] * len(panels), PANEL[1])
    axes = made.subplots(1, len(panels), squeeze=False, sharey=True).flatten()
    keys: dict[str, Line2D] = {}
    for axis, (protocol, panel) in zip(axes, panels.items(), strict=True):
        _panel(axis, protocol, panel)
        for curve in (panel.own, *panel.beside):
            keys.setdefault(_name(curve), _line(curve, panel))
    full = Line2D([], [], color=INK, linewidth=0.9, linestyle=(0, (5, 3)), label="full")
    style.legend(made, [*keys.values(), full], 5, size=8, handle=2.0, spacing=1.4)
    return made


def digest(panels: Mapping[str, CurvePanel]) -> str:
    """Names the numbers and the way in which they are drawn: a picture that carries another one is stale."""
    lines = [Path(file).read_text(encoding="utf-8") for file in (__file__, style.__file__)]
    for protocol, panel in panels.items():
        for curve in (panel.own, *panel.beside):
            numbers = [f"{p.budget} {p.share:.4f} {p.low:.4f} {p.high:.4f}" for p in curve.points]
            lines.append(f"{protocol} {curve.method} {curve.peer}: {numbers}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def is_current(path: Path, mark: str) -> bool:
    """Whether the picture at `path` is there and carries the digest `mark`."""
    return path.exists() and mark in path.read_text(encoding="utf-8")


def _panel(axis: Axes, protocol: str, panel: CurvePanel) -> None:
    style.title(axis, f"{panel.own.method.replace(':', ' ')}, {protocol}")
    style.calm(axis)
    axis.set_xscale("log", base=2)
    axis.axhline(1.0, color=INK, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1.5)
    for curve in (*panel.beside, panel.own):
        axis.add_line(_line(curve, panel))
    x = _budgets(panel.own)
    low, high = [p.low for p in panel.own.points], [p.high for p in panel.own.points]
    axis.vlines(x, low, high, color=colour_of(panel.own.method), linewidth=1.1)
    axis.set_ylim(-0.04, 1.08)
    axis.set_xlim(min(x) / 1.25, max(x) * 1.25)
    axis.set_xticks(x, [p.budget for p in panel.own.points])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))
    axis.set_xlabel("budget", fontsize=8, color=FAINT)


def _line(curve: Curve, panel: CurvePanel) -> Line2D:
    """The method in full, its press in its colour, dotted and hollow, references thin."""
    own, theirs = curve is panel.own, curve is panel.press
    colour = colour_of(panel.own.method if theirs else curve.method)
    line = Line2D(_budgets(curve), [point.share for point in curve.points], color=colour, label=_name(curve))
    line.set(linewidth=1.8 if own else 1.0, linestyle=(0, (1.5, 1.5)) if theirs else "-", zorder=3 if own else 2)
    if own or theirs:
        line.set(marker="o" if own else "D", markersize=5 if own else 4.2, markeredgecolor=PAPER if own else colour)
        line.set(markerfacecolor=colour if own else PAPER, markeredgewidth=0.7 if own else 1.0)
    return line


def _budgets(curve: Curve) -> list[float]:
    return [float(Budget.parse(point.budget).amount) for point in curve.points]


def _name(curve: Curve) -> str:
    name = curve.method.replace(":", " ")
    return name if curve.peer == "millpond" else f"{name.partition(' ')[0]} ({curve.peer})"
