"""Answers of a real model under methods, budgets and number formats, each paired with the full cache.

Reads folders that `millpond eval` wrote (`benchmarks/quality/real.sh` makes them), and writes one JSON file and one
Markdown table per task and protocol: the score with Wilson's interval over contexts, and the difference to the full
cache, or with --against to another cell, on the same questions with a paired interval. Cells that are not finished are
left out and named.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from millpond_lab.evals.harness.summary import paired_interval, share_interval

#: Where the file of a task lies, which rows do not tell.
_FOLDER = re.compile(r"(path|essay)=[^:]*/")
#: (task, protocol, method, budget, codec) -> (sample, question) -> its record.
Cells = dict[tuple[str, ...], dict[tuple[str, int], dict[str, Any]]]


def read(folder: Path) -> tuple[Cells, dict[str, int]]:
    """The cells of a folder, and how many questions each of its tasks has."""
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    found: Cells = {}
    for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        _, method, budget, codec, task, protocol, _, who = record["cell"].split("|")
        method = method if who == "millpond" else f"{method} ({who})"
        cell = found.setdefault((task, protocol, method, budget, codec), {})
        cell[record["sample"], record["question"]] = record
    return found, {name: task["questions"] for name, task in run["tasks"].items()}


def compared(
    found: Cells,
    questions: dict[str, int],
    contexts: tuple[int, int] | None = None,
    against: tuple[str, str] = ("full", ""),
) -> list[dict[str, Any]]:
    """A row for each cell whose questions are all answered, best first in each task and protocol.

    Args:
        contexts: compare on these only, from and to, in the order in which they are drawn; None: on all.
        against: method and budget of the cell, in bf16, that the others are paired with.
    """
    rows, left_out = [], []
    for key, answered in found.items():
        task, protocol, method, budget, codec = key
        full = found.get((task, protocol, *against, "auto"), {})
        span = slice(*contexts) if contexts is not None else slice(None)
        chosen = list(dict.fromkeys(sample for sample, _ in full))[span]
        full = {place: record for place, record in full.items() if place[0] in chosen}
        own = {place: record for place, record in answered.items() if place in full}
        finished = len(full) == questions[task] if contexts is None else len(chosen) == contexts[1] - contexts[0]
        if not finished or own.keys() != full.keys():
            left_out.append(f"{' '.join(key)}: {len(answered)} of {questions[task]} questions")
            continue
        scores, reference = _by_context(own), _by_context(full)
        whole = float(reference.mean())
        rows.append(
            {
                "task": _FOLDER.sub(r"\1=", task),
                "protocol": protocol,
                "method": method,
                "budget": budget,
                "codec": codec,
                "contexts": len(scores),
                "questions": len(own),
                "score": asdict(share_interval(scores)),
                "of_full": float(scores.mean()) / whole if whole else None,
                "difference": asdict(paired_interval(scores - reference)),
                "bytes": float(np.mean([r["kv_bytes"] / r["full_kv_bytes"] for r in own.values()])),
                "failures": sum(bool(record["failure"]) for record in own.values()),
            }
        )
    print("left out, not finished:", *(left_out or ["nothing"]), sep="\n  ")
    return sorted(rows, key=lambda row: (row["task"], row["protocol"], -row["score"]["mean"], row["bytes"]))


def _by_context(records: dict[tuple[str, int], dict[str, Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(contexts,) mean scores: the questions on one context are not independent."""
    each: dict[str, list[float]] = {}
    for (sample, _), record in sorted(records.items()):
        each.setdefault(sample, []).append(record["score"])
    return np.array([np.mean(scores) for scores in each.values()])


def table(rows: list[dict[str, Any]], against: tuple[str, str] = ("full", "")) -> str:
    """The rows of one task and protocol."""
    name = " ".join(against).strip()
    lines = [
        f"| method | budget | stored in | bytes of full | score | 95 % | of {name} | difference to {name}, 95 % |",
        "| --- | ---: | --- | ---: | ---: | --- | ---: | --- |",
    ]
    for row in rows:
        score, less = row["score"], row["difference"]
        of_full = "" if row["of_full"] is None else f"{row['of_full']:.2f}"
        apart = "" if (row["method"], row["budget"]) == against else f"{less['low']:+.2f} to {less['high']:+.2f}"
        lines.append(
            f"| {row['method']} | {row['budget'] or 'all'} | {'bf16' if row['codec'] == 'auto' else row['codec']} | "
            f"{row['bytes']:.1%} | {score['mean']:.3f} | {score['low']:.2f} to {score['high']:.2f} | {of_full} | "
            f"{apart} |"
        )
    return "\n".join(lines)


def page(rows: list[dict[str, Any]], against: tuple[str, str] = ("full", "")) -> str:
    """All tables, each under its task and protocol."""
    parts = []
    for task, protocol in dict.fromkeys((row["task"], row["protocol"]) for row in rows):
        own = [row for row in rows if (row["task"], row["protocol"]) == (task, protocol)]
        counts = f"{own[0]['questions']} questions on {own[0]['contexts']} contexts"
        parts.append(f"## {task}, {protocol}\n\n{counts}.\n\n{table(own, against)}\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="those that do not exist yet are passed over")
    parser.add_argument("--contexts", type=int, help="compare on the first ones only, where a run is not finished")
    parser.add_argument("--against", nargs=2, default=("full", ""), metavar=("METHOD", "BUDGET"))
    parser.add_argument("--out", type=Path, help="results, as .json; the tables lie next to it, as .md")
    args = parser.parse_args()
    span = None if args.contexts is None else (0, args.contexts)
    against = (args.against[0], args.against[1])
    rows = [row for folder in args.folders if folder.is_dir() for row in compared(*read(folder), span, against)]
    if not rows:
        parser.error("no cell in these folders is finished; run `benchmarks/quality/real.sh recall` first")
    print(page(rows, against))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        args.out.with_suffix(".md").write_text(page(rows, against), encoding="utf-8")


if __name__ == "__main__":
    main()
