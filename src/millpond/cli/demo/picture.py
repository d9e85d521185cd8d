"""The picture of the demo: which positions each head kept, method by method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from millpond.cli.demo.task import DemoOutcome

WATER = LinearSegmentedColormap.from_list("water", ["#f4f7f9", "#9ec9de", "#2878a8"])
KEPT, LOST, INK = "#e2711d", "#b9c0c7", "#22313f"
COLUMNS = 512  #: at most 512 cells over the width; a cell shows the share of its positions that is kept
ROW_INCHES, HEAD_INCHES = 0.15, 0.42


def draw(outcomes: Sequence[DemoOutcome], pairs: Sequence[int], length: int, file: Path, heading: str) -> None:
    """Write a PNG with one panel per method.

    A panel has a row per layer and KV head, and x is the position in the text.
    """
    rows = [len(outcome.kept) for outcome in outcomes]
    heights = [ROW_INCHES * n + HEAD_INCHES for n in rows]
    figure = Figure(figsize=(12, sum(heights) + 0.9), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(outcomes), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, outcome in zip(axes, outcomes, strict=True):
        _panel(axis, outcome, np.asarray(pairs), length)
    axes[-1].set_xlabel("position in the text", color=INK, fontsize=9)
    figure.text(0.01, 1 - 0.1 / figure.get_figheight(), heading, color=INK, fontsize=12, va="top")
    figure.legend(handles=_legend(), loc="upper right", ncols=3, frameon=False, fontsize=8, labelcolor=INK)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.32 / figure.get_figheight()))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def _panel(axis: Axes, outcome: DemoOutcome, pairs: npt.NDArray[np.int64], length: int) -> None:
    n = len(outcome.kept)
    axis.imshow(
        _shares(outcome.kept, length),
        cmap=WATER,
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
        extent=(0.0, float(length), n - 0.5, -0.5),
    )
    for row, kept in enumerate(outcome.kept):
        here = np.isin(pairs, kept)
        axis.plot(pairs[~here] + 0.5, np.full((~here).sum(), row), "|", color=LOST, markersize=5, markeredgewidth=0.8)
        axis.plot(pairs[here] + 0.5, np.full(here.sum(), row), "|", color=KEPT, markersize=6.5, markeredgewidth=1.3)
    for layer in range(1, n // outcome.heads):
        axis.axhline(layer * outcome.heads - 0.5, color="white", linewidth=1.6)
    centres = [layer * outcome.heads + (outcome.heads - 1) / 2 for layer in range(n // outcome.heads)]
    axis.set_yticks(centres, [f"layer {i}" for i in range(len(centres))], fontsize=7, color=INK)
    axis.set_title(
        f"{outcome.method}: {outcome.right} of {outcome.asked} right, {outcome.share:.0%} of the full cache's bytes",
        loc="left",
        fontsize=9.5,
        color=INK,
        pad=4,
    )
    axis.tick_params(length=0, labelsize=7, labelcolor=INK)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _shares(kept: Sequence[Sequence[int]], length: int) -> npt.NDArray[np.float64]:
    """Return the share of each cell's positions that is kept, (rows, cells)."""
    edges = np.linspace(0, length, min(length, COLUMNS) + 1)
    widths = np.histogram(np.arange(length), edges)[0]
    counts = [np.histogram(row, edges)[0] for row in kept]
    shares: npt.NDArray[np.float64] = np.stack(counts) / np.maximum(widths, 1)
    return shares


def _legend() -> list[Patch | Line2D]:
    return [
        Patch(facecolor=WATER(1.0), label="kept"),
        Line2D([], [], color=KEPT, marker="|", linestyle="", markeredgewidth=1.5, label="a pair's word, kept"),
        Line2D([], [], color=LOST, marker="|", linestyle="", markeredgewidth=1.0, label="a pair's word, evicted"),
    ]
