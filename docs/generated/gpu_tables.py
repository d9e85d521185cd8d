"""The tables of GPUs in `explanation/speed.md`, from the rows that `benchmarks/gpu/run_all.py` wrote."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from generated.gpu_goal_table import goal_table
from generated.gpu_longer_tables import latency_table, offload_table, served_table, storage_table
from generated.results import ROOT
from millpond_lab.bench.common.report import markdown_table

sys.path.append(str(ROOT / "benchmarks" / "gpu"))

from gpu_rows import read_rows

Row = dict[str, Any]
#: What the tables show of the kernels of one layer; the file has more.
PAGES = 64


def read(path: Path) -> list[Row]:
    """The rows of a file, the last one of each cell and card."""
    rows = read_rows(path)
    return list({(row["card"], row["section"], row["cell"]): row for row in rows}.values())


def gpu_section(rows: Sequence[Row]) -> str:
    """Every card's tables, one after another."""
    return "\n".join(card_section([row for row in rows if row["card"] == card]) for card in cards(rows))


def cards(rows: Sequence[Row]) -> list[str]:
    return sorted({row["card"] for row in rows})


def card_section(rows: Sequence[Row]) -> str:
    """The tables of one card; a section that has not run has none."""
    days = sorted({f"{row['day']}, torch {row['torch']}, Triton {row['triton']}" for row in rows})
    parts = [f"### {rows[0]['card']}\n\nMeasured on {'; '.join(days)}.\n"]
    if rates := [row for row in of(rows, "rates") if "error" not in row]:
        parts.append(rates_sentence(rates[-1]))
    shown: dict[str, Callable[[Sequence[Row]], str]] = {
        "step": step_table,
        "step without graphs": eager_table,
        "steady": steady_table,
        "served": served_table,
        "prompt": prompt_table,
        "profile": profile_table,
        "generate": generate_table,
        "offload": offload_table,
        "latency": latency_table,
        "storage": storage_table,
    }
    parts.append(tokens_sentence([row for row in rows if row["section"].startswith("tokens")]))
    for section, table in shown.items():
        if found := [row for row in of(rows, section) if not {"error", "skipped"} & set(row)]:
            parts.append(table(found))
    parts.append(kernel_tables([row for row in of(rows, "kernels") if "error" not in row]))
    parts.append(goal_table([row for row in rows if "error" not in row]))
    parts += [f"Not run: `{row['section']}` {row['cell']}: {row['skipped']}.\n" for row in rows if "skipped" in row]
    if errors := [f"`{row['section']}` {row['cell']}" for row in rows if "error" in row]:
        parts.append(f"Ended with an error, which the rows have: {', '.join(errors)}.\n")
    return "\n".join(part for part in parts if part)


def of(rows: Sequence[Row], section: str) -> list[Row]:
    return [row for row in rows if row["section"] == section]


def rates_sentence(row: Row) -> str:
    """What bounds are made of."""
    parts = [f"a copy reads and writes {row['copy_bytes_per_s'] / 1e12:.2f} TB/s"]
    if "flop_per_s" in row:
        parts.append(f"a product in bf16 takes {row['flop_per_s'] / 1e12:.0f} TFLOP/s")
        parts.append(f"an upload from pinned memory {row['upload_bytes_per_s'] / 1e9:.0f} GB/s")
    return f"In the same run {', '.join(parts)}.\n"


def tokens_sentence(rows: Sequence[Row]) -> str:
    """How many cells gave the tokens of the CPU, and which did not."""
    if not rows:
        return ""
    counts = [
        f"{sum(bool(row.get('ok')) for row in same)} of {len(same)} in {section.removeprefix('tokens: ')}"
        for section in sorted({row["section"] for row in rows})
        if (same := of(rows, section))
    ]
    bad = [f"{row['section'].removeprefix('tokens: ')} {row['cell']}" for row in rows if row.get("ok") is False]
    missed = f" Not in: {', '.join(bad)}." if bad else ""
    return f"Cells whose tokens and kept entries are the CPU's: {', '.join(counts)}.{missed}\n"


def setting_of(row: Row) -> str:
    """What the caches hold: the name of a cell without its shape."""
    return str(row["cell"]).rsplit(", ", 1)[0]


def times(row: Row) -> str:
    """How often the bound fits into what was measured."""
    return f"{row['ratio']:.2f} x" if "ratio" in row else ""


def across(rows: Sequence[Row], key: Callable[[Row], str], value: Callable[[Row], str], head: str) -> str:
    """A table with a row for each setting and a column for each `key`."""
    columns = list(dict.fromkeys(map(key, rows)))
    found = {(setting_of(row), key(row)): value(row) for row in rows}
    settings = list(dict.fromkeys(map(setting_of, rows)))
    return markdown_table(
        (head, *columns), ((name, *(found.get((name, column), "") for column in columns)) for name in settings)
    )


def step_table(rows: Sequence[Row]) -> str:
    """Milliseconds of a decoding step of the 8B shape."""
    order = sorted(rows, key=lambda row: (row["batch"], row["context"]))
    table = across(
        order,
        lambda row: f"{row['batch']} x {row['context']:,}",
        lambda row: f"{row['ms']:.1f} {times(row)}".strip(),
        "ms of a step",
    )
    notes = "".join(f"{row['cell']}: {row['note']}.\n" for row in order if "note" in row)
    bound = (
        "The factor is over reading the weights and what the caches hold, once, at the bandwidth of a copy. "
        if any("ratio" in row for row in rows)
        else ""
    )
    copies = "Caches are copies of one prompt's that was read. " if any("caches" in row for row in rows) else ""
    return f"A decoding step in the engine, recorded as a CUDA graph. {bound}{copies}\n\n{table}\n{notes}"


def eager_table(rows: Sequence[Row]) -> str:
    """The same without graphs."""
    table = across(rows, lambda row: f"{row['batch']} x {row['context']:,}", lambda row: f"{row['ms']:.1f}", "ms")
    return f"The same step, launched kernel by kernel:\n\n{table}"


def steady_table(rows: Sequence[Row]) -> str:
    """Tokens a second inside one memory limit, a table for each length of the caches."""
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    return "\n".join(steady_table_of([row for row in rows if row["context"] == context]) for context in contexts)


def steady_table_of(rows: Sequence[Row]) -> str:
    head = ("setting", "requests", "GB held", "tokens/s", "of the bound", "median ms of a step", "slowest")
    limit, context = rows[0]["limit_gb"], rows[0]["context"]
    table = markdown_table(
        head,
        [
            (
                str(row["cell"]).removesuffix(f", {context}"),
                str(row["requests"]),
                f"{row['requests'] * row['kv_bytes_each'] / 1e9:.1f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['tokens_per_s'] / row['bound_tokens_per_s']:.0%}",
                f"{row['ms']:.1f}",
                f"{row['slowest_ms']:,.0f}" if "slowest_ms" in row else "",
            )
            for row in rows
        ],
    )
    kept = [f"`{row['cell']}` keeps {row['kept_on_board']:.0%}" for row in rows if "kept_on_board" in row]
    board = f"Of the full cache's answers on the board {', '.join(kept)}.\n" if kept else ""
    return (
        f"As many requests of {context:,} tokens as {limit:g} GB for caches hold, decoding; tokens a second are over "
        f"all steps, those that open pages or are recorded among them.\n\n{table}{board}"
    )


def prompt_table(rows: Sequence[Row]) -> str:
    """Seconds to the first token."""
    table = across(
        rows,
        lambda row: f"{row['tokens']:,}",
        lambda row: f"{row['first_token_s']:.2f} {times(row)}".strip(),
        "tokens of a prompt",
    )
    return f"Seconds to the first token; the factor is over its operations at the rate of a product:\n\n{table}"


def profile_table(rows: Sequence[Row]) -> str:
    """What a step spends."""
    head = ("step", "ms", "device ms", "gaps ms", "kernels", "graph launches", "waits of the host")
    table = markdown_table(
        head,
        [
            (
                str(row["cell"]),
                f"{row['ms']:.1f}",
                figure(row, "device_ms"),
                figure(row, "gap_ms"),
                figure(row, "kernels"),
                f"{row['launches'].get('cudaGraphLaunch', 0):.1f}",
                f"{sum(w['calls'] for w in row['waits'].values()):.1f}",
            )
            for row in rows
        ],
    )
    return f"Where the time of a step goes (the rows name the kernels that take longest):\n\n{table}"


def figure(row: Row, name: str) -> str:
    return f"{row[name]:,.1f}" if name in row else ""


def generate_table(rows: Sequence[Row]) -> str:
    """generate() beside transformers' caches."""
    head = ("cache", "batch", "first token s", "ms/step", "over the bound", "peak GB")
    table = markdown_table(
        head,
        [
            (
                str(row["cache"]),
                f"{row['batch']} x {row['prompt']:,}",
                f"{row['first_token_s']:.2f}",
                f"{row['ms']:.1f}",
                times(row),
                f"{row['peak_gb']:.1f}",
            )
            for row in sorted(rows, key=lambda row: row["batch"])
        ],
    )
    alone = any(row.get("bound_of") == "weights alone" for row in rows)
    bound = "reading the weights" + ("" if alone else " and what caches hold") + ", once"
    return f"`generate()` of the same model, the host waiting for each token; the factor is over {bound}:\n\n{table}"


def kernel_tables(rows: Sequence[Row]) -> str:
    """The kernels of one layer."""
    decode = [row for row in rows if row["cell"].startswith("decode ") and row.get("page") == PAGES]
    prefill = [row for row in rows if row["cell"].startswith("prefill")]
    codes = [row for row in rows if row["cell"].startswith("decode codes")]
    parts: list[str] = []
    if decode:
        rules: Iterable[str] = dict.fromkeys(row["rule"] for row in decode)
        shapes = dict.fromkeys((row["batch"], row["stored"]) for row in decode)
        found = {(row["batch"], row["stored"], row["rule"]): f"{row['share_of_copy']:.0%}" for row in decode}
        table = markdown_table(
            ("batch x entries", *rules),
            ((f"{b} x {n:,}", *(found.get((b, n, rule), "") for rule in rules)) for b, n in shapes),
        )
        parts.append(
            f"A layer's decoding step (32 query heads over 8 KV heads of 128, bf16, pages of {PAGES}), share of the "
            f"bandwidth of a copy:\n\n{table}"
        )
    if prefill:
        table = markdown_table(
            ("tokens", "ms", "with column sums", "torch's flash attention"),
            [
                (f"{row['rows']:,}", f"{row['ms']:.2f}", f"{row['ms_with_sums']:.2f}", f"{row['ms_torch']:.2f}")
                for row in prefill
            ],
        )
        parts.append(f"Causal attention of a prompt in one layer, milliseconds:\n\n{table}")
    if codes:
        table = markdown_table(("format", "ms"), [(row["codec"], f"{row['ms']:.3f}") for row in codes])
        parts.append(
            f"A layer's decoding step over codes, {codes[0]['batch']} x {codes[0]['stored']:,} entries:\n\n{table}"
        )
    return "\n".join(parts)
