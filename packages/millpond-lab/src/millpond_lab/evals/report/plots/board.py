"""The board as a picture: answers that are kept over the bytes that are held, a panel for each model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from millpond.inspector.palette import FAINT, INK, PAPER
from millpond_lab.evals.report.board import FULL, Setting
from millpond_lab.evals.report.board_summary import Line, Summary, task_count
from millpond_lab.evals.report.plots import style

PANEL = (4.2, 3.1)  #: inches
#: Shares of the bytes that the axis names.
TICKS = (1.0, 0.5, 0.25, 0.125, 0.0625)
#: Colours of the ways to save bytes, which eyes of most kinds tell apart (Okabe and Ito, 2008).
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f8a94", "#8a6d00")


def board_picture(found: Summary, names: Mapping[str, str], named: Mapping[Setting, str]) -> Figure:
    """A line for each way to save bytes: points are means over tasks, and thin lines go down to the worst task.

    Args:
        names: of the models, as the panels show them.
        named: words that stand beside the points of some settings.
    """
    made = style.figure(PANEL[0] * len(names), PANEL[1] + 1.1)
    axes = made.subplots(1, len(names), squeeze=False, sharey=True).flatten()
    series: dict[str, list[Line]] = {}
    for line in found.lines:
        series.setdefault(series_of(line.setting), []).append(line)
    for axis, (name, shown) in zip(axes, names.items(), strict=True):
        _panel(axis, f"{shown}, {task_count(found.tasks[name])}", name, series, named)
    axes[0].set_ylabel("right answers kept", fontsize=8, color=FAINT)
    style.heading(
        made,
        "What is kept of the full cache's right answers, over the bytes that are held",
        "points: mean over tasks; thin lines: down to the worst task; questions come after the cache was compressed",
    )
    style.legend(made, [_key(words, colour) for words, colour in _colours(series).items()], 4)
    return made


def series_of(setting: Setting) -> str:
    """Which way to save bytes a setting is one of.

    Example:
        >>> series_of(Setting("full", codec="int8")), series_of(Setting("kvzip", "32%", "rotated4"))
        ('every entry in fewer bits', 'kvzip, rotated4')
    """
    if setting == FULL:
        return "full"
    if setting.method == "full":
        return "every entry in fewer bits"
    if setting.method.startswith("stored"):
        return "stored text"
    return setting.method + ("" if setting.codec == "auto" else f", {setting.codec}")


def _colours(series: Mapping[str, object]) -> dict[str, str]:
    return {words: INK if words == "full" else SERIES[place % len(SERIES)] for place, words in enumerate(series, -1)}


def _panel(
    axis: Axes, title: str, name: str, series: Mapping[str, Sequence[Line]], named: Mapping[Setting, str]
) -> None:
    style.title(axis, title)
    style.calm(axis)
    axis.set_xscale("log", base=2)
    axis.axhline(1.0, color=INK, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1.5)
    for (words, lines), colour in zip(series.items(), _colours(series).values(), strict=True):
        lines = [line for line in lines if name in line.models]
        shares = [line.bytes for line in lines]
        means = [1.0 if line.setting == FULL else line.models[name].mean for line in lines]
        least = [line.models[name].least for line in lines]
        axis.plot(shares, means, "-o", color=colour, linewidth=1.4, markersize=5.5, markeredgecolor=PAPER, zorder=3)
        axis.vlines(shares, least, means, color=colour, linewidth=1.0)
        for line, share, mean in zip(lines, shares, means, strict=True):
            beside = named.get(line.setting, "full" if words == "full" else "")
            axis.annotate(
                beside, (share, mean), (0, 7), textcoords="offset points", fontsize=8, ha="center", color=colour
            )
    axis.set_ylim(0, 1.14)
    axis.set_xlim(1.3, min(line.bytes for lines in series.values() for line in lines) / 1.3)
    axis.set_xticks(TICKS)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))
    axis.set_xlabel("bytes of keys and values, of a bf16 cache that keeps everything", fontsize=8, color=FAINT)


def _key(words: str, colour: str) -> Line2D:
    return Line2D([], [], color=colour, marker="o", markersize=5.5, linewidth=1.4, label=words)


def digest(found: Summary, names: Mapping[str, str], named: Mapping[Setting, str]) -> str:
    """Names the numbers and the way in which they are drawn: a picture that carries another one is stale."""
    code = [Path(file).read_text(encoding="utf-8") for file in (__file__, style.__file__)]
    lines = [
        f"{line.setting} {line.bytes:.4f} {[(n, round(k.mean, 4), round(k.least, 4)) for n, k in line.models.items()]}"
        for line in found.lines
    ]
    text = "\n".join([*code, *lines, str(found.tasks), str(dict(names)), str(dict(named))])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
