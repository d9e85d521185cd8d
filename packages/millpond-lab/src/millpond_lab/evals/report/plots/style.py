"""Style of all pictures: paper, ink, thin grid, the colour scale, and the file format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from millpond.inspector.palette import FAINT, GRID, INK, PAPER, water

SCALE = LinearSegmentedColormap.from_list("water", water(32))
#: Text stays text in SVG and PDF; ids in an SVG do not change from run to run.
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "millpond",
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
}
DPI = 160


def figure(width: float, height: float) -> Figure:
    """An empty picture; sizes in inches."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.05)
    made = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER, layout=layout)
    FigureCanvasAgg(made)
    return made


def heading(made: Figure, title: str, note: str) -> None:
    """What the picture shows, and below it how to read it."""
    made.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12.5, color=INK)
    made.text(0.0105, 1 - 0.40 / made.get_figheight(), note, fontsize=8.5, color=FAINT, va="center")


def calm(axis: Axes, grid: bool = True) -> None:
    """No frame, small ink labels, a thin grid behind the data."""
    for side, spine in axis.spines.items():
        spine.set_visible(grid and side == "bottom")
        spine.set_color(GRID)
    axis.tick_params(length=0, labelsize=8, labelcolor=FAINT, which="both")
    axis.set_axisbelow(True)
    if grid:
        axis.grid(axis="y", color=GRID, linewidth=0.7)


def title(axis: Axes, text: str) -> None:
    """The name of a panel."""
    axis.set_title(text, loc="left", fontsize=9.5, color=INK, pad=7)


def legend(
    made: Figure,
    keys: Sequence[Line2D],
    columns: int,
    *,
    size: float = 8.5,
    handle: float | None = None,
    spacing: float = 1.8,
) -> None:
    """The keys of all panels in one legend below them, without a frame.

    Args:
        made: the picture.
        keys: lines with labels, in reading order.
        columns: of the legend.
        size: of its text, in points.
        handle: length of a line in it, and `spacing` the space between two columns, in sizes of the text; None:
            matplotlib's own length.
        spacing: see `handle`.
    """
    made.legend(
        handles=keys,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=size,
        labelcolor=INK,
        handlelength=handle,
        columnspacing=spacing,
    )


def write(made: Figure, path: Path, about: str = "") -> Path:
    """Write a picture; the same numbers give the same file. An SVG carries the text `about`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, dict[str, Any]] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Description": about or None},
        "pdf": {"CreationDate": None},
    }
    with matplotlib.rc_context(SETTINGS):
        made.savefig(path, metadata=kinds[path.suffix[1:]])
    if path.suffix == ".svg":
        path.write_text(rounded(path.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def rounded(svg: str) -> str:
    """An SVG whose places have two decimals, which takes half of the bytes."""

    def places(attribute: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", attribute[0])

    return re.sub(r' (?:d|x|y|points)="[^"]*"', places, svg)
