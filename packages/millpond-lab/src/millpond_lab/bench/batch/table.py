"""Report of `bench batch` as Markdown."""

from __future__ import annotations

import statistics
from typing import Any

from millpond_lab.bench.batch.run import median_seconds, ratios
from millpond_lab.bench.common.report import markdown_table, model_phrase

_HEAD = ("method, order", "spared", "preempted", "seconds", "x batch (least to most)", "tokens of arrival")


def markdown(data: dict[str, Any]) -> str:
    """One row per method and order; ratios are those of runs of the same repetition."""
    plan = data["plan"]
    tree = ", ".join(f"{count} x {tokens}" for count, tokens in plan["tree"])
    limit = "no limit of KV memory" if plan["kv_memory"] is None else f"{plan['kv_memory']} of KV memory"
    rows = [_row(data, row) for row in data["results"]]
    return "\n".join(
        [
            "# Batches of prompts that begin alike\n",
            f"{data['hardware']}; {data['software']}.\n",
            f"`{data['command']}`\n" if "command" in data else "",
            f"{model_phrase(data['model'])}, {data['model']['parameters'] / 1e6:.3g}M parameters; "
            f"{data['prompts']} prompts in random order, texts per level x tokens: {tree}; {data['tokens']:,} tokens, "
            f"of which {data['distinct']:,} differ ({data['best']:.1%} could be spared); "
            f"{plan['new_tokens']} new tokens; {limit}; budget {plan['budget']} "
            f"but for full; medians of {plan['repeats']} repetitions in turns.\n",
            markdown_table(_HEAD, rows),
        ]
    )


def _row(data: dict[str, Any], row: dict[str, Any]) -> list[str]:
    times = ratios(data, row["method"], row["order"])
    ratio = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
    return [
        f"{row['method']}, {row['order']}",
        f"{row['spared']:.1%}",
        str(row["preemptions"]),
        f"{median_seconds(row):.2f}",
        ratio,
        "yes" if row["alike"] else "no",
    ]
