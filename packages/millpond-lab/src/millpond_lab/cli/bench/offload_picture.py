"""Picture of the offloading benchmark: tokens per second of each cell, with what was predicted of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millpond.inspector.palette import FAINT, INK, water
from millpond_lab.bench.offload.table import label_of, waited_share
from millpond_lab.evals.report.plots.style import calm, figure, heading, write

_BAR_INCHES, _HEAD_INCHES = 0.34, 1.1


def draw(data: dict[str, Any], path: Path) -> Path:
    """Write a bar for each cell that was measured, first to last from the top; a line marks the prediction."""
    rows = [row for row in data["rows"] if "failed" not in row][::-1]
    made = figure(9, _BAR_INCHES * len(rows) + _HEAD_INCHES)
    settings = data["settings"]
    heading(
        made,
        f"New tokens per second in {settings['memory'] / 2**20:,.0f} MiB, without the time waited for a core",
        f"{settings['shape']} in bf16, {data['model_bytes'] / 1e6:,.0f} MB; prompts of {settings['prompt']} and "
        f"answers of {settings['new']} tokens; line: predicted; *: projected",
    )
    axis = made.subplots()
    calm(axis, grid=False)
    ours, theirs = water(8)[5], water(8)[2]
    for place, row in enumerate(rows):
        rate = row["tokens_per_s"] / (1 - waited_share(row))
        predicted = row.get("predicted_tokens_per_s")
        axis.barh(place, rate, height=0.66, color=ours if predicted else theirs)
        axis.text(rate, place, f" {rate:,.3g}", va="center", fontsize=8, color=INK)
        if predicted:
            axis.plot([predicted] * 2, [place - 0.4, place + 0.4], color=INK, linewidth=1.2)
    names = [label_of(row, data) for row in rows]
    axis.set_yticks(range(len(rows)), names, color=FAINT)
    axis.set_xticks([])
    axis.margins(x=0.12)
    return write(made, path, f"Tokens per second of {data['command']}")
