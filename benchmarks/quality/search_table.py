"""The rows of `search.py` as one JSON file and one table per stage, and the best settings within given bytes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

#: Most bytes held, as shares of the full cache's; a page of 32 entries more or less decides nothing.
LIMITS = {"fifth": 0.20, "tenth": 0.10, "twentieth": 0.05}
SLACK = 0.005


def chosen(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per limit the settings within it, of those that Millpond has, by least divergence: the first of them."""
    found = {}
    for name, limit in LIMITS.items():
        fits = [
            row
            for row in rows
            if row["stage"] == name
            and row["bytes"] <= limit + SLACK
            and not row["setting"]["low"]
            and row["setting"]["score"] in ("all", "decay")
        ]
        if fits:
            found[name] = min(fits, key=lambda row: row["kl"])
    return found


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="rows-1024.jsonl of search.py")
    parser.add_argument("--out", type=Path, required=True, help="results, as .json; the table lies next to it, as .md")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.rows.read_text(encoding="utf-8").splitlines()]
    best = chosen(rows)
    args.out.write_text(
        json.dumps({"chosen": {k: v["name"] for k, v in best.items()}, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    parts = []
    for stage in dict.fromkeys(row["stage"] for row in rows):
        own = sorted((row for row in rows if row["stage"] == stage), key=lambda row: row["kl"])
        lines = ["| setting | bytes of full | divergence | nats more than full |", "| --- | ---: | ---: | ---: |"]
        lines += [f"| `{r['name']}` | {r['bytes']:.1%} | {r['kl']:.4f} | {r['more']:+.4f} |" for r in own]
        parts.append(f"## {stage}\n\n" + "\n".join(lines) + "\n")
    args.out.with_suffix(".md").write_text("\n".join(parts), encoding="utf-8")
    for name, row in best.items():
        print(f"{name}: {row['name']} ({row['bytes']:.1%}, {row['kl']:.4f})")


if __name__ == "__main__":
    main()
