"""Report of `bench chunks` as Markdown."""

from __future__ import annotations

import statistics
from typing import Any

from millpond_lab.bench.common.report import markdown_table, model_phrase

_TIMES = ("chunks in, computed again", "of the prompt computed", "s to the first token (least to most)", "x plain")
_QUARTERS = ("quarter", "tokens computed, x plain", "chunks found")


def markdown(data: dict[str, Any]) -> str:
    """Two tables: times to the first token, and what each quarter of the queries computed."""
    plan = data["plan"]
    parts = [
        "# Prompts of stored chunks\n",
        f"{data['hardware']}; {data['software']}.\n",
        f"`{data['command']}`\n" if "command" in data else "",
        f"{model_phrase(data['model'])}, {data['model']['parameters'] / 1e6:.3g}M parameters. Store: dtype "
        f"{plan['dtype']}, rule {plan['rule']}.\n",
        f"{plan['chunks']} chunks of {plan['tokens']} tokens in random order and {plan['suffix']} behind them; medians "
        f"of {plan['repeats']} repetitions in turns; files are in the system's cache.\n",
        markdown_table(_TIMES, _first_tokens(data["first_token"])),
    ]
    if data["quarters"]:
        parts += [
            f"{plan['n_queries']:,} queries of {plan['per_query']} of {plan['pool']} chunks of {plan['query_tokens']} "
            f"tokens, drawn evenly, one after another; the store holds {plan['held']:.0%} of the chunks; "
            "recompute auto.\n",
            markdown_table(_QUARTERS, _quarters(data["quarters"])),
        ]
    return "\n".join(parts)


def _first_tokens(timings: list[dict[str, Any]]) -> list[list[str]]:
    plain = statistics.median(timings[0]["seconds"])
    return [
        [
            _setting(one),
            f"{one['computed']:.0%}",
            f"{statistics.median(one['seconds']):.4g} ({min(one['seconds']):.4g} to {max(one['seconds']):.4g})",
            f"{statistics.median(one['seconds']) / plain:.2f}",
        ]
        for one in timings
    ]


def _setting(one: dict[str, Any]) -> str:
    if not one["tier"]:
        return "plain"
    return f"{one['tier']}, {one['share'] if one['share'] == 'auto' else format(one['share'], '.0%')}"


def _quarters(quarters: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [str(number), f"{one['computed']:.3f}", f"{one['hits']:.1%}"] for number, one in enumerate(quarters, start=1)
    ]
