"""The report of `millpond bench paging` in Markdown."""

from __future__ import annotations

from typing import Any

from millpond_lab.bench.common.report import markdown_table


def paging_markdown(data: dict[str, Any]) -> str:
    """Hit rates by trace, rule and size, then the costs of the rules."""
    parts = [
        "# Paging rules: hit rates and costs\n",
        f"{data['hardware']}; {data['software']}.\n",
        f"`{data['command']}`\n",
        "A request uses its pages in order; none is evicted before those after it, nor while its request runs.\n"
        "Each cell: hits over accesses, one replay from an empty cache.\n",
    ]
    rows = data["results"]
    for trace in dict.fromkeys(row["trace"] for row in rows):
        of_trace = [row for row in rows if row["trace"] == trace]
        first = of_trace[0]
        sizes = list(dict.fromkeys(row["pages"] for row in of_trace))
        rates = {(row["rule"], row["pages"]): f"{row['hit_rate']:.4f}" for row in of_trace}
        rules = dict.fromkeys(row["rule"] for row in of_trace)
        parts += [
            f"## {trace}\n",
            f"{first['requests']:,} requests, {first['accesses']:,} accesses to {first['distinct']:,} pages; "
            f"an endless cache hits {1 - first['distinct'] / first['accesses']:.4f}.\n",
            markdown_table(
                ["rule", *(f"{pages:,} pages" for pages in sizes)],
                [[rule, *(rates.get((rule, pages), "") for pages in sizes)] for rule in rules],
            ),
        ]
        bounded = [row for row in of_trace if row["bound"] is not None]
        if bounded:
            parts.append(
                markdown_table(
                    ["rule", "pages", "misses", "the paper's bound", "share of it"],
                    [
                        [
                            row["rule"],
                            f"{row['pages']:,}",
                            f"{row['misses']:,}",
                            f"{row['bound']:,.0f}",
                            f"{row['misses'] / row['bound']:.3f}",
                        ]
                        for row in bounded
                    ],
                )
            )
    if data["costs"]:
        parts += ["## Costs\n", costs_table(data["costs"])]
    return "\n".join(parts)


def costs_table(costs: list[dict[str, Any]]) -> str:
    """Time and memory of each rule."""
    return markdown_table(
        ["rule", "pages", "victim, median, µs", "99th percentile, µs", "access, µs", "bytes a page", "victims timed"],
        [
            [
                cost["rule"],
                f"{cost['pages']:,}",
                f"{cost['victim_us']:.1f}",
                f"{cost['victim_99_us']:.1f}",
                f"{cost['touch_us']:.1f}",
                f"{cost['bytes_per_page']:.0f}",
                f"{cost['timed']:,}",
            ]
            for cost in costs
        ],
    )
