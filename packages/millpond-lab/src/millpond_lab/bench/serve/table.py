"""The report of a run, on the screen and as Markdown."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from millpond_lab.bench.common.report import markdown_table
from millpond_lab.bench.serve.run import PERCENTILES

_TIMES = {"ttft_s": "time to first token", "tpot_s": "time per token after it", "e2e_s": "whole answer"}


def rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    """What is shown, line by line."""
    s = data["summary"]
    lines = [
        ("requests", f"{s['sent']:,} sent, {s['answered']:,} answered, {s['failed']:,} failed"),
        *((f"failed: {kind}", f"{n:,}") for kind, n in s["failures"].items()),
        ("time", f"{s['seconds']:.1f} s"),
        ("rate", f"{s['requests_per_s']:.2f} requests/s"),
        ("output", f"{s['output_tokens']:,} tokens, {s['output_tokens_per_s']:,.1f} tokens/s"),
        (
            "prompts and output",
            f"{s['prompt_tokens'] + s['output_tokens']:,} tokens, {s['total_tokens_per_s']:,.1f} tokens/s",
        ),
        *((text, _spread(s[name])) for name, text in _TIMES.items()),
        ("sent later than planned", _spread(s["late_s"])),
    ]
    for name, limit in s["levels_s"].items():
        lines.append((f"{name} within {limit:g} s", f"{s['attained'][name]:.1%}"))
    if s["levels_s"]:
        lines.append(("all of these at once", f"{s['attained_jointly']:.1%}"))
        lines.append(("goodput", f"{s['goodput_per_s']:.2f} requests/s"))
    lines += [(f"peak of {name}", f"{value:,.6g}") for name, value in sorted(data["server"]["peaks"].items())]
    lines += [(f"gained {name}", f"{value:,.6g}") for name, value in sorted(data["server"]["gained"].items())]
    return lines


def screen(data: dict[str, Any]) -> Table:
    """For a terminal."""
    table = Table(title=f"{data['model']} · {data['trace']} · {data['load']}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows(data):
        table.add_row(name, value)
    return table


def markdown(data: dict[str, Any]) -> str:
    """For a file."""
    head = f"# {data['model']} under load\n\n{data['trace']}; {data['load']}. `{data['command']}`\n\n"
    return head + markdown_table(("figure", "value"), rows(data))


def _spread(times: dict[str, float] | None) -> str:
    if times is None:
        return "none"
    return ", ".join(f"p{p} {_time(times[f'p{p}'])}" for p in PERCENTILES)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
