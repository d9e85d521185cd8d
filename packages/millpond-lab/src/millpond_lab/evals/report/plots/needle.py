"""Needle heat maps: recall by depth and length of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from millpond.errors import DataError
from millpond.inspector.palette import FAINT, text_on, water
from millpond_lab.evals.decoding.record import Cell, Record
from millpond_lab.evals.report.plots.style import SCALE, calm, figure, heading, title

COLUMNS = 4
#: Cells up to which each shows its number.
NUMBERED = 60


@dataclass(frozen=True)
class NeedlePanel:
    """One candidate: its name and its records with facts "depth" and "length"."""

    name: str
    records: Sequence[Record]


def panels_of(cells: Sequence[Cell], records: Sequence[Record]) -> dict[tuple[str, str, str], list[NeedlePanel]]:
    """Panels by (model, task without its options, protocol), of the records that know depth and length."""
    by_cell: dict[str, list[Record]] = {}
    for record in records:
        if "depth" in record.facts and "length" in record.facts:
            by_cell.setdefault(record.cell, []).append(record)
    found: dict[tuple[str, str, str], dict[str, list[Record]]] = {}
    for cell in cells:
        own = by_cell.get(cell.key, [])
        name = cell.method + (f" {cell.budget}" if cell.budget else "")
        name += ("" if cell.codec == "auto" else f", {cell.codec}") + (
            "" if cell.peer == "millpond" else f" ({cell.peer})"
        )
        if own:
            page = found.setdefault((cell.model, cell.task.partition(":")[0], cell.protocol), {})
            page.setdefault(name, []).extend(own)
    return {key: [NeedlePanel(name, own) for name, own in page.items()] for key, page in found.items()}


def needle(panels: Sequence[NeedlePanel], heading_text: str) -> Figure:
    """Mean score over depth (downwards) and length (to the right), a panel per candidate.

    Raises:
        DataError: there is nothing to draw.
    """
    if not panels:
        raise DataError("no record has the facts depth and length, so there is no heat map to draw")
    depths = sorted({float(r.facts["depth"]) for panel in panels for r in panel.records})
    lengths = sorted({int(r.facts["length"]) for panel in panels for r in panel.records})
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    width, height = max(2.3, 0.42 * len(lengths) + 0.9), max(1.9, 0.26 * len(depths) + 0.75)
    made = figure(max(width * columns + 0.8, 5.5), height * lines + 0.95)
    axes = made.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for place, (axis, panel) in enumerate(zip(axes.flatten(), panels, strict=False)):
        _map(axis, panel, depths, lengths)
        if place % columns == 0:
            axis.set_ylabel("depth of the needle", fontsize=8, color=FAINT)
        if place + columns >= len(panels):
            axis.set_xlabel("tokens", fontsize=8, color=FAINT)
            axis.tick_params(labelbottom=True)
    for axis in axes.flatten()[len(panels) :]:
        axis.set_visible(False)
    bar = made.colorbar(axes[0, 0].images[0], ax=axes, fraction=0.025, pad=0.015, aspect=30)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=FAINT)
    heading(made, heading_text, "mean score by depth and length; 0 is the beginning of the text; white was not asked")
    return made


def grid(panel: NeedlePanel, depths: Sequence[float], lengths: Sequence[int]) -> npt.NDArray[np.float64]:
    """(depths, lengths) mean scores, NaN where nothing was asked."""
    sums, counts = np.zeros((len(depths), len(lengths))), np.zeros((len(depths), len(lengths)))
    for record in panel.records:
        at = depths.index(float(record.facts["depth"])), lengths.index(int(record.facts["length"]))
        sums[at] += record.score
        counts[at] += 1
    means: npt.NDArray[np.float64] = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return means


def _map(axis: Axes, panel: NeedlePanel, depths: Sequence[float], lengths: Sequence[int]) -> None:
    values = grid(panel, depths, lengths)
    axis.imshow(values, cmap=SCALE, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    calm(axis, grid=False)
    title(axis, f"{panel.name}   {np.nanmean(values):.2f}")
    every = max(1, -(-len(depths) // 9))
    axis.set_yticks(range(0, len(depths), every), [f"{d:.0%}" for d in depths[::every]])
    every = max(1, -(-len(lengths) // 8))
    axis.set_xticks(range(0, len(lengths), every), [f"{n:,}" for n in lengths[::every]])
    axis.set_xticks(np.arange(len(lengths) + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(len(depths) + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1.2)
    if values.size <= NUMBERED:
        shades = water(32)
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                ink = text_on(shades[round(31 * min(max(value, 0.0), 1.0))])
                axis.text(
                    column, row, f"{value:.2f}".removeprefix("0"), ha="center", va="center", fontsize=6.5, color=ink
                )
