"""Perplexity of a real model's text under methods, budgets and number formats, each paired with the full cache.

With --against all are paired with another cell than the full cache's.

Reads folders that `millpond eval` wrote (`benchmarks/quality/real.sh` makes them), and writes one JSON file and one
Markdown table per task: the ratio to the full cache's perplexity, with a paired bootstrap over windows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

DRAWS, SEED = 10_000, 7


def cells(folders: list[Path]) -> dict[tuple[str, ...], dict[str, dict[str, Any]]]:
    """(task, method, budget, codec) -> window -> its record."""
    found: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for folder in folders:
        for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            _, method, budget, codec, task, *_ = record["cell"].split("|")
            found.setdefault((task, method, budget, codec), {})[record["sample"]] = record
    return found


def compared(
    found: dict[tuple[str, ...], dict[str, dict[str, Any]]], windows: int, against: tuple[str, str] = ("full", "")
) -> list[dict[str, Any]]:
    """One row per cell that has all windows, best first in each task.

    Args:
        against: method and budget of the cell, in bf16, that the others are paired with.
    """
    rows, left_out = [], []
    for key, own in found.items():
        task, method, budget, codec = key
        full = found.get((task, *against, "auto"), {})
        names = [*full][:windows]
        if len(names) < windows or not own.keys() >= {*names}:
            left_out.append(" ".join(key[1:]) + f" ({len(own)} windows)")
            continue
        nll = np.array([own[name]["score"] for name in names])
        lost = nll - np.array([full[name]["score"] for name in names])
        draws = np.random.default_rng(SEED).integers(0, len(lost), (DRAWS, len(lost)))
        low, high = np.exp(np.percentile(lost[draws].mean(1), [2.5, 97.5])) - 1
        rows.append(
            {
                "task": task,
                "method": method,
                "budget": budget,
                "codec": codec,
                "windows": len(names),
                "perplexity": float(np.exp(nll.mean())),
                "more": float(np.exp(lost.mean()) - 1),
                "low": float(low),
                "high": float(high),
                "bytes": float(np.mean([r["kv_bytes"] / r["full_kv_bytes"] for r in (own[name] for name in names)])),
                "failures": sum(bool(record["failure"]) for record in (own[name] for name in names)),
            }
        )
    print("left out, not finished:", *(left_out or ["nothing"]), sep="\n  ")
    return sorted(rows, key=lambda row: (row["task"], row["perplexity"]))


def table(rows: list[dict[str, Any]], against: str = "full") -> str:
    """The rows of one task."""
    lines = [
        f"| method | budget | stored in | bytes of full | perplexity | more than {against} | 95 % |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    lines += [
        f"| `{r['method']}` | {r['budget'] or 'all'} | {'bf16' if r['codec'] == 'auto' else r['codec']} | "
        f"{r['bytes']:.1%} | {r['perplexity']:.2f} | {r['more']:+.1%} | {r['low']:+.1%} to {r['high']:+.1%} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--windows", type=int, default=60, help="how many of the reference's a finished cell has")
    parser.add_argument("--against", nargs=2, default=("full", ""), metavar=("METHOD", "BUDGET"))
    parser.add_argument("--out", type=Path, required=True, help="results, as .json; the table lies next to it, as .md")
    args = parser.parse_args()
    rows = compared(cells(args.folders), args.windows, tuple(args.against))
    args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    parts = [
        f"## {task}\n\n{table([row for row in rows if row['task'] == task], ' '.join(args.against).strip())}\n"
        for task in dict.fromkeys(row["task"] for row in rows)
    ]
    args.out.with_suffix(".md").write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
