"""The budget map: how many entries each KV head of each layer holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from millpond.errors import DataError
from millpond.inspector.palette import FAINT, text_on, water
from millpond.inspector.trace import Trace
from millpond_lab.evals.report.plots.style import SCALE, calm, figure, heading

#: Heads up to which each shows its number.
NUMBERED = 160


def budgets_of_trace(trace: Trace, step: int = 0) -> list[list[int]]:
    """Entries held after `step`, [layer][KV head]; of a cache, `CacheStats.stored` tells them."""
    return [[len(head.kept(step)) for head in layer] for layer in trace.heads]


def budget_map(stored: Sequence[Sequence[int]], title: str, seen: int) -> Figure:
    """Entries per layer (a row each) and KV head.

    Raises:
        DataError: no head holds anything.
    """
    values = np.asarray(stored, float)
    if values.ndim != 2 or not values.size or not values.any():
        raise DataError("no head holds an entry, so there is no map to draw")
    layers, heads = values.shape
    low, high = float(values.min()), float(values.max())
    low = min(low, 0.5 * high)  # equal budgets are one colour, and small differences do not look large
    made = figure(max(4.6, 0.52 * heads + 1.8), max(2.0, 0.3 * layers) + 1.3)
    axis = made.subplots()
    image = axis.imshow(values, cmap=SCALE, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    calm(axis, grid=False)
    axis.set_xticks(range(heads), [str(h) for h in range(heads)])
    every = max(1, -(-layers // 16))
    axis.set_yticks(range(0, layers, every), [str(layer) for layer in range(0, layers, every)])
    axis.set_xlabel("KV head", fontsize=8, color=FAINT)
    axis.set_ylabel("layer", fontsize=8, color=FAINT)
    axis.set_xticks(np.arange(heads + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(layers + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1.6)
    if values.size <= NUMBERED:
        shades = water(32)
        for (layer, head), value in np.ndenumerate(values):
            ink = text_on(shades[round(31 * (value - low) / (high - low))])
            axis.text(head, layer, f"{value:.0f}", ha="center", va="center", fontsize=7.5, color=ink)
    bar = made.colorbar(image, ax=axis, fraction=0.04, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=FAINT)
    mean = values.mean()
    heading(made, title, f"entries held of {seen:,} tokens read; {mean:,.1f} on average ({mean / seen:.0%})")
    return made
