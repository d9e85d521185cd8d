"""The picture of heavy hitters: gathered attention per layer, the first token's share, and sparsity, head by head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from torch import Tensor

    from millpond_lab.train.text.eval import AttentionStatistics

INK, QUIET = "#22313f", "#b9c0c7"


def draw(found: AttentionStatistics, file: Path) -> None:
    """Write a PNG with three panels: the curves of gathered mass, and two maps of layers and heads."""
    figure = Figure(figsize=(12, 4.2), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    curves, sink, sparse = figure.subplots(1, 3, width_ratios=(1.35, 1, 1))
    _curves(curves, found)
    _map(sink, found.first, "attention to the first token")
    _map(sparse, found.sparsity, "entries below 1 % of the row's maximum")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def _curves(axis: Axes, found: AttentionStatistics) -> None:
    """One line per layer, mean over heads."""
    x = np.linspace(0, 100, found.curve.shape[-1])
    layers = len(found.curve)
    for layer, curve in enumerate(found.curve.mean(1)):
        colour = colormaps["viridis"](0.9 * layer / max(1, layers - 1))
        axis.plot(x, 100 * curve.numpy(), color=colour, linewidth=1.5, label=f"layer {layer}")
    for share, mass in found.even.items():
        axis.plot(100 * share, 100 * mass, "x", color=INK, label="even attention" if share == min(found.even) else None)
        axis.axvline(100 * share, color=QUIET, linewidth=0.8, linestyle=":")
    axis.set_xlim(0, 100)
    axis.set_ylim(0, 101)
    axis.set_xlabel("heaviest columns, % of all", fontsize=8.5, color=INK)
    axis.set_ylabel("% of all attention that they gathered", fontsize=8.5, color=INK)
    axis.set_title("gathered attention", loc="left", fontsize=9.5, color=INK)
    axis.legend(frameon=False, fontsize=7.5, labelcolor=INK, loc="lower right")
    axis.tick_params(labelsize=7.5, labelcolor=INK)


def _map(axis: Axes, table: Tensor, title: str) -> None:
    """(n_layers, n_heads) shares as colours and as numbers."""
    values = 100 * table.numpy()
    axis.imshow(values, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for (layer, head), value in np.ndenumerate(values):
        colour = "white" if value > 60 else INK
        axis.text(head, layer, f"{value:.0f}", ha="center", va="center", fontsize=7.5, color=colour)
    axis.set_xlabel("query head", fontsize=8.5, color=INK)
    axis.set_ylabel("layer", fontsize=8.5, color=INK)
    axis.set_title(f"{title}, %", loc="left", fontsize=9.5, color=INK)
    axis.tick_params(length=0, labelsize=7.5, labelcolor=INK)
