"""Rows of the summary: means with their intervals over samples, and the table that a person reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from millpond_lab.evals.decoding.record import PRETENDED, Cell, Record, SummaryRow
from millpond_lab.evals.intervals import Interval, resampled_interval, share_interval
from millpond_lab.evals.task import Kind

#: How the intervals came about, for those who read a table.
HOW = "95 % intervals over samples: Wilson's; of perplexities, the bootstrap's."


def summarise(cell: Cell, records: Sequence[Record], kind: Kind) -> SummaryRow:
    """The row of a cell."""
    exp = kind == "perplexity"
    found = _interval(records, cell.seed, exp)
    fed = [record.weight for record in records if kind in ("perplexity", "fidelity") and not record.failure]
    held = [record for record in records if record.full_kv_bytes]
    return SummaryRow(
        **asdict(cell),
        score=found.mean,
        low=found.low,
        high=found.high,
        better="lower" if exp else "higher",
        n=len(records),
        failures=sum(bool(record.failure) for record in records),
        kv_bytes=_over_samples(held, lambda r: r.kv_bytes),
        full_kv_bytes=_over_samples(held, lambda r: r.full_kv_bytes),
        kept_share=_over_samples(held, lambda r: r.kept_share),
        masks_only=any(PRETENDED in record.extra for record in records),
        extra=_extra(records),
        scored_tokens=int(sum(fed)),
    )


def _interval(records: Sequence[Record], seed: int, perplexity: bool) -> Interval:
    """Score and its interval. Questions of one sample are taken together, as they share a context."""
    samples = list(by_sample(records).values())
    sums = np.array([sum(r.weight * r.score for r in own) for own in samples])
    weights = np.array([sum(r.weight for r in own) for own in samples])
    if perplexity:
        return resampled_interval(sums, weights, seed, np.exp)
    asked = weights > 0
    return share_interval(sums[asked] / weights[asked], weights[asked])


def by_sample(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of one sample together, as they share a context."""
    samples: dict[str, list[Record]] = {}
    for record in records:
        samples.setdefault(record.sample, []).append(record)
    return samples


def _over_samples(records: Sequence[Record], value: Callable[[Record], float]) -> float:
    """The mean over samples of the mean over their questions; 0 if nothing was measured."""
    means = [sum(map(value, own)) / len(own) for own in by_sample(records).values()]
    return sum(means) / len(means) if means else 0.0


def _extra(records: Sequence[Record]) -> dict[str, float]:
    """Means of what else was measured, over the records that measured it."""
    names = dict.fromkeys(name for record in records for name in record.extra)
    means = {}
    for name in names:
        own = [record for record in records if name in record.extra]
        weight = sum(record.weight for record in own)
        if weight:
            means[name] = sum(record.weight * record.extra[name] for record in own) / weight
    return means


def markdown(rows: Sequence[SummaryRow], *notes: str) -> str:
    """The summary as a Markdown table, in the order of the rows, and notes below it."""
    heads = ["task", "protocol", "method", "budget", "codec", "score", "95 %", "kept", "KV bytes", "n", "failures"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * 5 + " ---: |" * 6]
    for row in rows:
        score, interval = score_text(row)
        cells = [
            row.task,
            row.protocol,
            candidate_name(row),
            row.budget or "all",
            row.codec,
            score,
            interval,
            f"{row.kept_share:.1%}",
            f"{row.kv_bytes:,.0f}",
            asked_text([row]),
            str(row.failures),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    note = f"{HOW} Score: higher is better, but for perplexity (ppl)."
    return "\n".join([*lines, "", *filter(None, [note, *notes])])


def asked_text(rows: Sequence[SummaryRow], unit: str = "") -> str:
    """How much was asked of each of these rows: "40", or "40 questions, 5,120 tokens scored"."""
    n = max(row.n for row in rows)
    return ", ".join(filter(None, [f"{n:,} {unit if n > 1 else unit.removesuffix('s')}".rstrip(), scored_text(rows)]))


def scored_text(rows: Sequence[SummaryRow]) -> str:
    """How many tokens were scored in each of these rows, "" where answers were: "5,120 tokens scored"."""
    counts = sorted({row.scored_tokens for row in rows if row.scored_tokens})
    span = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1]))) if counts else ""
    return span and f"{span} tokens scored"


def candidate_name(row: SummaryRow) -> str:
    """The method, and whose it is where it is not ours."""
    own = row.method if row.peer == "millpond" else f"{row.method} ({row.peer})"
    return f"{own}, masks only" if row.masks_only else own


def score_text(row: SummaryRow) -> tuple[str, str]:
    """Score and interval as people read them: ("0.500", "0.400 to 0.600")."""
    if math.isnan(row.score):
        return "none", "all failed"
    unit = " ppl" if row.better == "lower" else ""
    return f"{row.score:.3f}{unit}", f"{row.low:.3f} to {row.high:.3f}"
