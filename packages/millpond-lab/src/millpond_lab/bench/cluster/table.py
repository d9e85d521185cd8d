"""The report of the cluster benchmark as Markdown."""

from __future__ import annotations

from typing import Any

from millpond_lab.bench.common.report import markdown_table


def markdown(data: dict[str, Any]) -> str:
    """One line for each layout; differences are to one engine without Ray, within the same round."""
    settings = data["settings"]
    head = (
        f"# One engine, replicas and split workers\n\n{data['hardware']}. {data['software']}. `{data['command']}`\n\n"
        f"{settings['requests']} requests of {settings['prompt']} tokens and {settings['output']} new ones, "
        f"{settings['users']} in flight, through HTTP, streamed; {settings['rounds']} rounds, in each of which every "
        "layout has the same load once, in another order, while the other servers wait. Medians of rounds; in brackets "
        "the smallest and the largest of the rounds' differences.\n\n"
    )
    names = (
        "layout",
        "failed",
        "tokens/s",
        "of single",
        "first token, ms",
        "more than single, ms",
        "answer, ms",
        "more than single, ms",
        "moved, ms each",
        "KB each",
    )
    return head + markdown_table(names, [_line(row) for row in data["results"]])


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    rate = row["rate"]
    return (
        row["layout"],
        str(row["failed"]),
        f"{row['tokens_per_s']:,.1f}",
        f"{rate['median']:.3f} [{rate['low']:.3f}, {rate['high']:.3f}]",
        f"{1000 * row['ttft_s']:,.1f}",
        _more(row["ttft_more_s"]),
        f"{1000 * row['e2e_s']:,.1f}",
        _more(row["e2e_more_s"]),
        "" if row["move_s"] is None else f"{1000 * row['move_s']:,.1f}",
        "" if row["moved_bytes"] is None else f"{row['moved_bytes'] / 1000:,.0f}",
    )


def _more(found: dict[str, float]) -> str:
    return f"{1000 * found['median']:+,.1f} [{1000 * found['low']:+,.1f}, {1000 * found['high']:+,.1f}]"
