"""Perplexity of a long text, per stretch, out of the files of long_stream.py: JSON, Markdown and a picture.

long_stream_page.py --windows WINDOWS.jsonl --out benchmarks/results/long-stream.json --svg FILE RUN.jsonl...
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

from millpond_lab.bench.common.report import markdown_table

STRETCH = 100_000

Run = tuple[dict[str, Any], list[dict[str, Any]]]


def read(path: Path) -> Run:
    """The header of a run and its records."""
    head, *records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return head, records


def passes(run: Run) -> list[tuple[int, int, float]]:
    """(first token, tokens, summed loss) of every pass."""
    head, records = run
    found, at = [], 0
    for record in records:
        for loss in record["losses"]:
            count = min(head["rows"], head["tokens"] - at)
            found.append((at, count, loss))
            at += count
    return found


def stretches(run: Run, length: int = STRETCH) -> list[dict[str, Any]]:
    """A row per stretch of `length` tokens; the last may be shorter."""
    rows: dict[int, list[tuple[int, int, float]]] = {}
    for one in passes(run):
        rows.setdefault(one[0] // length, []).append(one)
    result = []
    for n, inside in rows.items():
        end = inside[-1][0] + inside[-1][1]
        own = [r for r in run[1] if n * length < r["seen"] <= (n + 1) * length]
        held = {name: own[-1][name] for name in ("stored", "kv_bytes", "resident_bytes")} if own else {}
        times = {"pass_ms": statistics.median(r["pass_ms"] for r in own)} if own else {}
        loss = sum(one[2] for one in inside) / sum(one[1] for one in inside)
        result.append({"begin": n * length, "end": end, "perplexity": math.exp(loss), **times, **held})
    return result


def paired(run: Run, windows: Run) -> dict[str, Any] | None:
    """The run and the reference on the tokens that both scored; None where there are none."""
    by_start = {at: (count, loss) for at, count, loss in passes(run)}
    own, reference, tokens, used = 0.0, 0.0, 0, 0
    for window in windows[1]:
        at, end, loss = window["begin"], window["begin"] + window["tokens"], 0.0
        while at < end and at in by_start:
            count, one = by_start[at]
            at, loss = at + count, loss + one
        if at == end:
            own, reference = own + loss, reference + window["losses"][0]
            tokens, used = tokens + window["tokens"], used + 1
    if not used:
        return None
    return {
        "windows": used,
        "tokens": tokens,
        "perplexity": math.exp(own / tokens),
        "reference": math.exp(reference / tokens),
    }


def markdown(results: list[dict[str, Any]]) -> str:
    """A table per run."""
    parts = ["# A long text through a small cache\n"]
    for result in results:
        head, pair = result["run"], result["paired"]
        parts.append(
            f"## `{head['method']}`, {head['budget']} entries, {head['rows']} tokens a pass\n\n"
            f"{head['model']} (weights {head['weights_sha256'][:12]}), {head['dtype']}; {', '.join(head['texts'])}; "
            f"{result['stretches'][-1]['end']:,} of {head['tokens']:,} tokens read; {head['hardware']}, "
            f"{head['software']}, other processes on the machine."
        )
        if pair:
            parts.append(
                f"\nOn {pair['windows']} stretches of {pair['tokens'] // pair['windows']:,} tokens, perplexity "
                f"{pair['perplexity']:.2f}; of the model without a limit, which has read 1,024 tokens before each "
                f"of them, {pair['reference']:.2f}."
            )
        rows = [
            (
                f"{row['begin']:,} to {row['end']:,}",
                f"{row['perplexity']:.2f}",
                f"{row['pass_ms']:.1f}",
                str(row["stored"]),
                f"{row['kv_bytes'] / 1e6:.1f}",
                f"{row['resident_bytes'] / 1e6:,.0f}",
            )
            for row in result["stretches"]
            if "stored" in row
        ]
        head_row = ("tokens", "perplexity", "ms per pass", "entries per head", "KV MB", "process MB")
        parts.append("\n" + markdown_table(head_row, rows))
    return "\n".join(parts)


def draw(runs: list[Run], path: Path) -> None:
    """Perplexity and time of a pass over the tokens read, a point per 10,000 tokens, as SVG."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "millpond"
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(7.5, 5), sharex=True)
    for run in runs:
        rows = [row for row in stretches(run, 10_240) if "pass_ms" in row]
        at = [row["end"] / 1000 for row in rows]
        above.plot(at, [row["perplexity"] for row in rows], label=run[0]["method"])
        below.plot(at, [row["pass_ms"] for row in rows], label=run[0]["method"])
    above.set_yscale("log")
    above.set_ylabel("perplexity")
    above.legend()
    below.set_ylabel(f"ms per pass of {runs[0][0]['rows']} tokens")
    below.set_ylim(bottom=0)
    below.set_xlabel("thousand tokens read")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--windows", type=Path, help="the reference, if there is one")
    parser.add_argument("--stretch", type=int, default=STRETCH, help="tokens of a row")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    runs, windows = [read(path) for path in args.runs], args.windows and read(args.windows)
    results = [
        {"run": run[0], "paired": windows and paired(run, windows), "stretches": stretches(run, args.stretch)}
        for run in runs
    ]
    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    if args.svg:
        draw([run for run in runs if run[0]["rows"] == runs[0][0]["rows"]], args.svg)


if __name__ == "__main__":
    main()
