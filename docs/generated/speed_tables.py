"""Speed and memory of `generate()`, for the page about speed."""

from __future__ import annotations

from typing import Any

from generated.results import read
from millpond_lab.bench.common.report import generate_table


def result_table() -> str:
    """The committed measurement of generate() at the longest prompt of one sequence."""
    data, prompt, rows = measured()
    origin = f"{data['hardware']}; {data['software']}; `{data['command']}`."
    where = f"One sequence, prompt {prompt:,} ([all cells](../../benchmarks/results/generate.md))."
    return f"{origin}\n{where}\n\n{generate_table(rows, data['anchor'])}"


def measured() -> tuple[dict[str, Any], int, list[dict[str, Any]]]:
    """The committed measurement of generate(), its longest prompt of one sequence, and the rows of that."""
    data = read("generate")
    prompt = max(r["prompt"] for r in data["results"] if r["batch"] == 1)
    return data, prompt, [r for r in data["results"] if (r["batch"], r["prompt"]) == (1, prompt)]
