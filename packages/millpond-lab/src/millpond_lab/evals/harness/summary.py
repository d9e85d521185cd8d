"""Rows of the summary: means with their intervals over samples, and the table that a person reads."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from millpond.errors import DataError
from millpond_lab.evals.decoding.record import PRETENDED, Cell, Record, SummaryRow
from millpond_lab.evals.harness.store import RUN, SAMPLES, SUMMARY, parse_records, read_json
from millpond_lab.evals.task import Kind

RESAMPLES = 2000
#: Numbers drawn at once, 32 MB.
_AT_ONCE = 4_000_000
#: The normal distribution's 97.5 % point.
Z = 1.959963984540054

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval; NaN where there is nothing to take the mean of."""

    mean: float
    low: float
    high: float


NOTHING = Interval(math.nan, math.nan, math.nan)


def share_interval(scores: Floats, weights: Floats | None = None) -> Interval:
    """Of a mean of scores in 0 to 1, (n,), one for each independent sample: Wilson's score interval.

    For right and wrong answers it is exactly Wilson's (1927). Scores in between (shares of an answer, means over the
    questions of a sample) count as the number of right or wrong answers that has the same variance; it is computed with
    z^2 / 2 right and as many wrong answers added, as in Wilson's centre, so that it is never 0.
    """
    if weights is None:
        weights = np.ones(len(scores))
    if not weights.any():
        return NOTHING
    mean, n, variance = _moments(scores, weights, np.zeros(len(scores), int))
    half = Z * Z / 2
    centre = (n * mean + half) / (n + 2 * half)
    spread = n * (variance + (mean - centre) ** 2) + half * (centre**2 + (1 - centre) ** 2)
    return wilson(mean, n * centre * (1 - centre) * (n + 2 * half) / spread)


def wilson(share: float, n: float) -> Interval:
    """Wilson's score interval of a share of n independent answers."""
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + (Z / (2 * n)) ** 2)
    # at 0 and 1 the formula's ends are these, but for rounding
    return Interval(share, min(max(centre - half, 0.0), share), max(min(centre + half, 1.0), share))


def paired_interval(
    differences: Floats, weights: Floats | None = None, groups: npt.NDArray[np.int_] | None = None
) -> Interval:
    """Of a mean of differences in -1 to 1, (n,), one for each independent sample that both sides have answered.

    Bonett and Price's (2012) adjusted Wald interval of paired proportions, which adds a pair that only the first side
    has right and one that only the other has. Where differences may be smaller than 1 (shares of an answer, means over
    several questions), the pairs added differ by as much as those that differ do on average; by 1 where none does.

    Args:
        weights: (n,) what each counts for; groups: (n,) samples whose difference is drawn around the same mean, as
            those of one task: what tasks differ by is no chance.
    """
    weights = np.ones(len(differences)) if weights is None else weights
    if not weights.any():
        return NOTHING
    groups = np.zeros(len(differences), int) if groups is None else groups
    mean, n, variance = _moments(differences, weights, groups)
    apart = np.abs(differences[differences != 0])
    added = float(apart.mean()) if len(apart) else 1.0
    centre = mean * n / (n + 2)
    spread = (n * (variance + (mean - centre) ** 2) + (added - centre) ** 2 + (added + centre) ** 2) / (n + 2)
    half = Z * math.sqrt(spread / (n + 2))
    return Interval(mean, max(centre - half, -1.0), min(centre + half, 1.0))


def resampled_interval(
    sums: Floats, weights: Floats, seed: int, scale: Callable[[Floats], Floats] = np.positive
) -> Interval:
    """Of a mean of numbers without bounds: the percentiles of its bootstrap, see `bootstrap`."""
    if not weights.any():
        return NOTHING
    means = bootstrap(sums, weights, seed)
    low, high = np.percentile(means[~np.isnan(means)], [2.5, 97.5])
    return Interval(*map(float, scale(np.array([sums.sum() / weights.sum(), low, high]))))


def bootstrap(sums: Floats, weights: Floats, seed: int, resamples: int = RESAMPLES) -> Floats:
    """Weighted means of resampled samples, (resamples,): sums (n,) of weight * score, weights (n,); NaN where 0 / 0.

    Each resample draws n samples with replacement. The same seed gives the same numbers.
    """
    rng, n = np.random.default_rng(seed), len(sums)
    rows = max(1, _AT_ONCE // n)
    parts = []
    for begin in range(0, resamples, rows):
        drawn = rng.integers(0, n, (min(rows, resamples - begin), n))
        parts.append(_ratio(sums[drawn].sum(1), weights[drawn].sum(1)))
    return np.concatenate(parts)


def _moments(values: Floats, weights: Floats, groups: npt.NDArray[np.int_]) -> tuple[float, float, float]:
    """The weighted mean, how many equally weighted samples it is worth, and the variance of one around its group's."""
    own = (np.bincount(groups, weights * values) / np.bincount(groups, weights))[groups]
    squares = weights**2
    n = weights.sum() ** 2 / squares.sum()
    return float(np.average(values, weights=weights)), float(n), float(np.average((values - own) ** 2, weights=squares))


def _ratio(sums: Floats, weights: Floats) -> Floats:
    ratio: Floats = np.divide(sums, weights, out=np.full(len(sums), math.nan), where=weights != 0)
    return ratio


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


_ROW = {field.name for field in fields(SummaryRow)}
_CELL = [field.name for field in fields(Cell)]


def read_rows(path: Path) -> list[SummaryRow]:
    """The rows of a run's folder, or of a summary file.

    Raises:
        DataError: there is no summary, or it is not a list of rows.
    """
    file = path / SUMMARY if path.is_dir() else path
    if not file.exists():
        raise DataError(f"{path} holds no {SUMMARY}; millpond eval --out {path} writes one")
    data = read_json(file)
    if not isinstance(data, list):
        raise DataError(f"{file} is not a list of rows")
    return [_row(file, number, item) for number, item in enumerate(data, 1)]


def _row(file: Path, number: int, item: Any) -> SummaryRow:
    if not isinstance(item, dict) or not _ROW - {"masks_only", "extra", "scored_tokens"} <= item.keys() <= _ROW:
        got = sorted(item) if isinstance(item, dict) else type(item).__name__
        raise DataError(f"{file}, row {number} has the fields {got}, not those of a row: {sorted(_ROW)}")
    numbers = {name: math.nan for name in ("score", "low", "high") if item[name] is None}
    return SummaryRow(**{**item, **numbers})


def cell_of(row: SummaryRow) -> Cell:
    """The cell that a row sums up."""
    return Cell(**{name: getattr(row, name) for name in _CELL})


def read_samples(folder: Path) -> list[Record]:
    """The records of a run's folder; none where it holds no samples.

    Raises:
        DataError: a line is not a record.
    """
    file = folder / SAMPLES
    return parse_records(file, file.read_bytes()) if file.exists() else []


def read_notes(path: Path) -> list[dict[str, str]]:
    """How a run was made, once for each time that it was started; none where it was not recorded."""
    file = (path if path.is_dir() else path.parent) / RUN
    runs: Sequence[Any] = read_json(file).get("runs", []) if file.exists() else []
    return [{name: str(value) for name, value in note.items()} for note in runs if isinstance(note, dict)]


def unite(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Rows of several folders; where two speak of the same cell they must agree.

    Raises:
        DataError: two runs give one cell different scores.
    """
    found: dict[Cell, SummaryRow] = {}
    for row in rows:
        cell = cell_of(row)
        before = found.setdefault(cell, row)
        if (before.n, repr(before.score)) != (row.n, repr(row.score)):
            raise DataError(
                f"two results for {row.method} {row.budget} on {row.task} ({row.protocol}, seed {row.seed}): "
                f"{before.score:.4f} of {before.n} and {row.score:.4f} of {row.n}; name only one of the runs"
            )
    return list(found.values())


Verdict = Literal["holds", "no difference seen", "reversed"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean score of one candidate less that of another.

    Attributes:
        mean: over tasks of the mean over questions. low, high: its 95 % interval. n: samples.
    """

    mean: float
    low: float
    high: float
    n: int

    @property
    def verdict(self) -> Verdict:
        """Whether the first is better, as far as these samples can tell."""
        return "holds" if self.low > 0 else "reversed" if self.high < 0 else "no difference seen"


def difference(
    ours: Mapping[str, Sequence[Record]], theirs: Mapping[str, Sequence[Record]], seed: int, shares: bool = True
) -> Difference:
    """The difference on the tasks that name the records, each task with the same weight.

    Where a side has a sample's question several times, as at several budgets, their mean counts: records of one sample
    stay together.

    Args:
        shares: scores lie in 0 to 1 (see `paired_interval`); False where they have no bounds, as nats: then samples
            are resampled within each task, for both sides at once, from `seed`.

    Raises:
        DataError: the sides did not answer the same questions, or there are none.
    """
    if not ours or ours.keys() != theirs.keys():
        raise DataError(f"two sides of a comparison must have the same tasks, not {sorted(ours)} and {sorted(theirs)}")
    tasks = [_of_task(task, ours[task], theirs[task]) for task in ours]
    n = sum(len(weights) for _, weights in tasks)
    if shares:
        values = np.concatenate([sums / weights for sums, weights in tasks])
        parts = np.concatenate([weights / weights.sum() for _, weights in tasks])
        group = np.repeat(np.arange(len(tasks)), [len(weights) for _, weights in tasks])
        found = paired_interval(values, parts, group)
        return Difference(found.mean, found.low, found.high, n)
    seeds = [zlib.crc32(f"{seed} {task}".encode()) for task in ours]
    drawn = [bootstrap(sums, weights, own) for (sums, weights), own in zip(tasks, seeds, strict=True)]
    low, high = np.percentile(np.mean(drawn, axis=0), [2.5, 97.5])
    mean = sum(float(sums.sum() / weights.sum()) for sums, weights in tasks) / len(tasks)
    return Difference(mean, float(low), float(high), n)


def _of_task(task: str, ours: Sequence[Record], theirs: Sequence[Record]) -> tuple[Floats, Floats]:
    """Sums of weight * difference, and of weights, by sample."""
    mine, other = by_sample(ours), by_sample(theirs)
    if not mine or {name: _asked(own) for name, own in mine.items()} != {k: _asked(v) for k, v in other.items()}:
        raise DataError(f"task {task!r}: the two sides of a comparison did not answer the same questions")
    sums = np.array([_total(mine[name]) - _total(other[name]) for name in mine])
    return sums, np.array([sum(record.weight for record in own) for own in mine.values()])


def _asked(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Questions and what they count for, however they are ordered."""
    return sorted((record.question, record.weight) for record in records)


def _total(records: Sequence[Record]) -> float:
    return sum(record.weight * record.score for record in records)
