"""The report of `bench engines` in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond_lab.bench.common.report import markdown_table, model_phrase

HEAD = (
    "engine",
    "cache",
    "prefill s",
    "of ours",
    "decode ms/step",
    "of ours",
    "compared with",
    "of reading once",
    "KV MB",
    "weights MB",
    "RSS MB",
)


def markdown(data: dict[str, Any]) -> str:
    """One table per cell."""
    model = data["model"]
    parts = [
        "# Engines: speed and memory\n",
        f"{data['hardware']}. {data['software']}.\n",
        f"Made by `{data['command']}`.\n",
        f"{model_phrase(model)}, {model['dtype']}; "
        f"{data['threads']} threads in each engine; {data['new_tokens']} steps; medians of {data['repeats']} "
        "repetitions in turns, ratios within a turn: above 1.00 x ours is faster. Prefill lasts until every sequence "
        "has its first token, in the engine's own order of work. Of reading once: a step "
        "over reading the weights and the engine's KV bytes once with as many threads, measured right behind it. KV: "
        "in use at the end, as the engine counts it. RSS: the most while it answered, beyond what its process held "
        "before it loaded the model. Weights: as the engine holds them, where it says so.\n",
        *(f"* {name}: {note}" for name, note in data["engines"].items()),
        "",
    ]
    for batch, prompt in dict.fromkeys((r["batch"], r["prompt"]) for r in data["results"]):
        rows = [r for r in data["results"] if (r["batch"], r["prompt"]) == (batch, prompt)]
        parts += [f"## Batch {batch}, prompt {prompt:,}\n", _table(rows)]
    return "\n".join(parts)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    return markdown_table(HEAD, [_row(row) for row in rows])


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    if row["decode_ms"] is None:
        return (row["name"], row["setting"], row.get("failure") or "not run", *[""] * (len(HEAD) - 3))
    return (
        row["name"],
        row["setting"],
        f"{row['prefill_s']:.2f}",
        _times(row["prefill_ratio"]),
        f"{row['decode_ms']:.1f}",
        _times(row["decode_ratio"]),
        row["against"].removeprefix("millpond, "),
        _times(row["above_floor"]),
        f"{row['kv_bytes'] / 1e6:.1f}",
        _megabytes(row.get("weight_bytes")),
        _megabytes(row["rss_bytes"]),
    )


def _megabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.0f}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} x"
