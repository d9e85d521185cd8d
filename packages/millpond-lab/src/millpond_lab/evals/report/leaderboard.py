"""The leaderboard: committed results as one Markdown page. `render` is pure, so that a check can compare the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.harness.summary import HOW, scored_text
from millpond_lab.markdown import one_per_line

K = TypeVar("K")

NOTE = "<!-- written by millpond leaderboard; run it again instead of editing -->\n"
#: Candidates that show what is possible, and take no part in the ranking.
REFERENCES = {"full": "keeps everything", "oracle": "knows what the full cache will attend to: the upper bound"}
PROTOCOLS = {
    "aware": "context and question are compressed together",
    "agnostic": "the context is compressed before any question is seen",
    "turns": "the context is compressed before any question is seen; questions follow one another",
}
MASKED = "†"
#: Methods that decide by networks that were trained for the model.
TRAINED = ("attention_gate", "locret")


@dataclass(frozen=True)
class Line:
    """One candidate in one table: its rows by task, with those of the full cache."""

    name: str
    rows: dict[str, SummaryRow]
    full: dict[str, SummaryRow]
    n_tasks: int

    @property
    def is_reference(self) -> bool:
        """It takes no part in the ranking."""
        return next(iter(self.rows.values())).method.partition(":")[0] in REFERENCES

    @property
    def average(self) -> float:
        """Mean score over the tasks where more is better; NaN where one of them is missing."""
        scores = [row.score for row in self.rows.values() if row.better == "higher"]
        wanted = sum(row.better == "higher" for row in self.full.values()) if self.full else len(scores)
        return _mean(scores) if len(self.rows) == self.n_tasks and len(scores) == wanted else math.nan

    @property
    def of_full(self) -> float:
        """Mean share of the full cache's quality; for perplexity the full cache's over this one's."""
        if len(self.rows) < self.n_tasks or not self.rows.keys() <= self.full.keys():
            return math.nan
        return _mean([_share(row, self.full[task]) for task, row in self.rows.items()])

    @property
    def kv_bytes(self) -> float:
        """Mean bytes held."""
        return _mean([row.kv_bytes for row in self.rows.values()])

    @property
    def bytes_share(self) -> float:
        """Of what the full cache holds."""
        return self.kv_bytes / (_mean([row.full_kv_bytes for row in self.rows.values()]) or math.nan)


def render(rows: Sequence[SummaryRow], notes: Sequence[dict[str, str]] = ()) -> str:
    """The page: a table for each model, protocol and budget, best first; how it was made below.

    Args:
        rows: of any number of runs.
        notes: of the runs, with "command" and "hardware" where known.
    """
    parts = [NOTE, "# Leaderboard\n", _legend(rows)]
    for model, of_model in _grouped(rows, lambda r: r.model):
        parts.append(f"## {_cell(model)}\n")
        for (protocol, seed), table in _grouped(of_model, lambda r: (r.protocol, r.seed)):
            budgets = sorted({r.budget for r in table if r.budget}, key=_budget_order) or [""]
            for budget in budgets:
                parts += _table(protocol, seed, budget, [r for r in table if r.budget in ("", budget)])
    return one_per_line("\n".join([*parts, *_made(notes)]))


def _table(protocol: str, seed: int, budget: str, rows: Sequence[SummaryRow]) -> list[str]:
    tasks = list(dict.fromkeys(row.task for row in rows))
    full = {row.task: row for row in rows if row.method == "full" and row.peer == "millpond"}
    lines = [Line(name, {row.task: row for row in own}, full, len(tasks)) for name, own in _grouped(rows, _name)]
    lines.sort(key=_rank)
    best = {
        task: _best([line.rows[task] for line in lines if task in line.rows and not line.is_reference])
        for task in tasks
    }
    heads = ["method", *map(_task, tasks), "average", "of full", "KV bytes", "bytes of full"]
    body = [
        [
            f"*{line.name}*" if line.is_reference else line.name,
            *(_score(line.rows.get(task), not line.is_reference and best[task]) for task in tasks),
            _number(line.average, "{:.3f}"),
            _number(line.of_full, "{:.1%}"),
            f"{line.kv_bytes:,.0f}",
            _number(line.bytes_share, "{:.1%}"),
        ]
        for line in lines
    ]
    title = (
        f"### {PROTOCOLS.get(protocol, protocol).split(';')[0].capitalize()} ({protocol}), budget {budget or 'none'}\n"
    )
    failed, asked = sum(row.failures for row in rows), span(row.n for row in rows)
    scored = f" ({scored_text(rows)})" if scored_text(rows) else ""
    note = f"{asked} questions a task{scored}, seed {seed}."
    note += f" {failed:,} failed and count as wrong." if failed else ""
    return [title, markdown_table(heads, body), f"{note}\n"]


def _legend(rows: Sequence[SummaryRow]) -> str:
    text = (
        f"Score and interval; **bold** is the best score of its column, with what reads the same. {HOW} "
        "Each interval is of one score alone: whether one candidate is ahead of another "
        "is said by pairs of answers to the same questions. "
        "*Slanted* rows are references, outside the ranking: "
        + "; ".join(f"`{name}` {what}" for name, what in REFERENCES.items())
        + ". Rows are sorted by the average. KV bytes: keys and values really held when answering began.\n"
    )
    if any(row.better == "lower" for row in rows):
        text += "\nppl: perplexity, lower is better; it counts in *of full*, not in the average.\n"
    if any(row.masks_only for row in rows):
        text += (
            f"\n{MASKED} hides entries instead of freeing them: its KV bytes are really held, its scores are those "
            "of the budget.\n"
        )
    trained = sorted({row.method.partition(":")[0] for row in rows} & {*TRAINED})
    if trained:
        text += (
            f"\n{', '.join(f'`{name}`' for name in trained)}: by networks that were trained for the model; the card of "
            "its networks says on what. Those of pond-recall saw texts of the same families as its tasks.\n"
        )
    return text


def _made(notes: Sequence[dict[str, str]]) -> list[str]:
    lines = []
    for note in notes:
        what = [f"`{note['command']}`"] if note.get("command") else []
        what += [note[name] for name in ("hardware", "software") if note.get(name)]
        lines += [f"* {'; '.join(what)}"] if what else []
    return ["## How it was made\n", *dict.fromkeys(lines), ""] if lines else []


def _name(row: SummaryRow) -> str:
    """A candidate as a row's first cell names it."""
    name = f"`{row.method}`" + (f", {row.codec}" if row.codec != "auto" else "")
    if row.peer != "millpond":
        name += f" ({row.peer})"
    return _cell(name) + (f" {MASKED}" if row.masks_only else "")


def _task(task: str) -> str:
    return _cell(task.replace(":", " "))


def _score(row: SummaryRow | None, best: str | bool) -> str:
    """A score in a table, bold if it reads as the best one does."""
    if row is None:
        return "–"
    if math.isnan(row.score):
        return "all failed"
    text = _reads(row)
    shown = f"**{text}**" if text == best else text
    return f"{shown} ({row.low:.3f} to {row.high:.3f})"


def _reads(row: SummaryRow) -> str:
    return f"{row.score:.3f}" + (" ppl" if row.better == "lower" else "")


def _best(rows: Sequence[SummaryRow]) -> str:
    """How the best score of a column reads; "" if there is none."""
    known = [row for row in rows if not math.isnan(row.score)]
    if not known:
        return ""
    return _reads(min(known, key=lambda r: r.score if r.better == "lower" else -r.score))


def _share(row: SummaryRow, full: SummaryRow) -> float:
    part, whole = (full.score, row.score) if row.better == "lower" else (row.score, full.score)
    return part / whole if whole else math.nan


def _rank(line: Line) -> tuple[bool, float, float, str]:
    """High averages first; without one, high shares of full; incomplete lines last."""
    average, share = line.average, line.of_full
    nothing = math.isnan(average) and math.isnan(share)
    return nothing, -(0.0 if math.isnan(average) else average), -(0.0 if math.isnan(share) else share), line.name


def _budget_order(budget: str) -> tuple[int, float, str]:
    """Shares, then tokens, then bytes, each ascending."""
    number = "".join(c for c in budget if c.isdigit() or c == ".")
    kind = 0 if budget.endswith("%") else 1 if budget == number else 2
    return kind, float(number or 0), budget


def _grouped(rows: Sequence[SummaryRow], key: Callable[[SummaryRow], K]) -> list[tuple[K, list[SummaryRow]]]:
    """Rows by key, keys in the order in which they first came."""
    order = {k: place for place, k in enumerate(dict.fromkeys(map(key, rows)))}
    ordered = sorted(rows, key=lambda row: order[key(row)])
    return [(k, list(own)) for k, own in groupby(ordered, key=key)]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else form.format(value)


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|")


def span(numbers: Iterable[int]) -> str:
    """Counts in words: "200", or "40 to 200" where they differ."""
    counts = sorted(set(numbers))
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"


def markdown_table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    rule = "| --- |" + " ---: |" * (len(heads) - 1)
    return "\n".join(["| " + " | ".join(heads) + " |", rule, *("| " + " | ".join(row) + " |" for row in body), ""])
