"""Tables of GPUs: answers end to end, models beyond the device, the latency of a batch, and the storage codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond_lab.bench.common.report import markdown_table

Row = dict[str, Any]


def served_table(rows: Sequence[Row]) -> str:
    """Tokens a second end to end, and how much of the full cache's could be gained at most."""
    head = ("setting", "requests", "tokens/s", "of the bound", "over full", "at most", "prompt s", "ms of a step", "")
    table = markdown_table(
        head,
        [
            (
                str(row["cell"]),
                str(row["requests"]),
                f"{row['tokens_per_s']:,.0f}",
                f"{row['share_of_bound']:.0%}",
                gain(row, rows, "tokens_per_s"),
                gain(row, rows, "bound_tokens_per_s"),
                f"{row['prompt_s']:.2f}",
                f"{row['step_ms']:.1f}",
                row.get("projected", ""),
            )
            for row in rows
        ],
    )
    return (
        f"The same end to end: requests arrive, {rows[0]['prompt']:,} tokens of each are read, answers are written. "
        "The bound is the same engine's prompts and steps one after another; what reading costs caps what a smaller "
        f"cache can gain over the full one.\n\n{table}"
    )


def gain(row: Row, rows: Sequence[Row], figure: str) -> str:
    """A figure over that of the full cache with equal answers."""
    name = "full" + str(row["cell"])[str(row["cell"]).rindex(", + ") :]
    full = [other for other in rows if other["cell"] == name]
    return f"{row[figure] / full[0][figure]:.2f} x" if full else ""


def offload_table(rows: Sequence[Row]) -> str:
    """Models that the GPU holds in part."""
    head = ("cell", "requests", "tokens/s", "ms of a step", "bound", "peak GB", "")
    table = markdown_table(
        head,
        [
            (
                str(row["cell"]),
                str(row["requests"]),
                f"{row['tokens_per_s']:.1f}",
                f"{row['step_ms']:,.0f}",
                f"{row['bound_ms']:,.0f}" if "bound_ms" in row else "",
                f"{row['peak_gb']:.1f}" if "peak_gb" in row else "",
                "projected from " + row["projected"] if "projected" in row else "",
            )
            for row in rows
        ],
    )
    return (
        f"OPT shapes with random weights inside {rows[0]['memory']}, the rest on the host, prompts + answers; "
        f"the bound of a step is an upload of the weights that do not fit:\n\n{table}"
    )


def latency_table(rows: Sequence[Row]) -> str:
    """Seconds of one batch."""
    head = ("batch", "seconds", "over the bound", "prompts s", "ms of a step", "projected from")
    table = markdown_table(
        head,
        [
            (
                str(row["cell"]),
                f"{row['latency_s']:.1f}",
                f"{row['ratio']:.2f} x",
                f"{row['prompt_s']:.2f}",
                f"{row['step_ms']:.1f}",
                row["projected"],
            )
            for row in rows
        ],
    )
    return f"One batch of an OPT shape on the device, requests x tokens of prompts + answers:\n\n{table}"


def storage_table(rows: Sequence[Row]) -> str:
    """The codec that texts are stored in."""
    table = markdown_table(
        ("codec `transform`", "GB/s of bf16", "bound", "set by"),
        [
            (str(row["cell"]), f"{row['gb_per_s']:.1f}", f"{row['bound_gb_per_s']:.0f}", str(row["bound_of"]))
            for row in rows
        ],
    )
    return f"A layer's keys and values, {rows[0]['tokens']:,} tokens, to pages of codes and back:\n\n{table}"
