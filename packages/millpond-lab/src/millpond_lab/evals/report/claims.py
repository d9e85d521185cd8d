"""Claims of papers, as pairs of candidates that a run can have. Data only.

A pair names two methods of ours that differ in what is claimed, and in as little else as their options allow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millpond.budget import Budget
from millpond.errors import DataError
from millpond_lab.evals.decoding.record import Cell, Record, SummaryRow
from millpond_lab.evals.harness.store import read_json
from millpond_lab.evals.harness.summary import Difference, cell_of, difference, read_rows, read_samples
from millpond_lab.evals.report.kvpress_equivalents import ALIKE, PRESSES, is_press


@dataclass(frozen=True, slots=True)
class Claim:
    """An ordering.

    Attributes:
        name: of its place on the page. title: in words. source: who says so. pairs: the better one first.
        middle: only questions about facts between a quarter and three quarters of the text.
        `beside`: what else differs within a pair, by the better one's name.
    """

    name: str
    title: str
    source: str
    pairs: tuple[tuple[str, str], ...]
    middle: bool = False
    beside: tuple[tuple[str, str], ...] = ()


CLAIMS = (
    Claim(
        "ada",
        "Head budgets by competition over equal ones",
        "Ada-KV, arXiv:2407.11550",
        (("ada", "snapkv"), ("ada:score=h2o", "h2o"), ("ada:score=pyramidkv", "pyramidkv")),
    ),
    Claim(
        "floor",
        "A higher floor for every head over the default of 0.2",
        "ours, to see what competition costs",
        (("ada:alpha=0.6", "ada"), ("ada:alpha=0.6", "snapkv")),
    ),
    Claim(
        "critical",
        "Attention and values over attention alone",
        "CriticalKV, arXiv:2502.03805",
        (("criticalkv", "snapkv"),),
    ),
    Claim(
        "pyramid",
        "A pyramid of layer budgets over equal ones",
        "PyramidKV, arXiv:2406.02069",
        (("pyramidkv", "snapkv"),),
    ),
    Claim(
        "merge",
        "Merging over dropping",
        "D2O, EMS, KVMerger, CaM and Elastic Cache",
        (
            ("merge_on_evict", "snapkv"),
            ("merge_on_evict:score=h2o", "h2o"),
            ("kvmerger", "h2o:recent=0.34:sinks=0:decode=grow"),
            ("kvmerger", "h2o:recent=0.34:sinks=0"),
            ("d2o", "h2o"),
            ("ems", "ems:threshold=1.1"),
            ("cam", "streaming:positions=absolute"),
            ("elastic", "elastic:merge=none"),
        ),
        beside=(
            (
                "kvmerger",
                "keeps runs of neighbours where h2o keeps single entries; it grows after the prompt, as does "
                "h2o with decode=grow, and h2o without it does not",
            ),
            ("d2o", "shares its budget out over the layers"),
        ),
    ),
    Claim(
        "alike",
        "Merging only what is nearly equal over merging everything",
        "ours, to see what merging costs",
        (("merge_on_evict:threshold=0.9", "merge_on_evict"), ("merge_on_evict:threshold=0.9", "snapkv")),
    ),
    Claim(
        "mass",
        "Counting what a merged entry stands for over not counting it",
        "ours: with it, merging equal entries is lossless",
        tuple((f"{name}:mass_bias=true", name) for name in ("merge_on_evict", "kvmerger", "d2o", "ems", "cam")),
    ),
    Claim("heavy", "Heavy hitters over the window", "H2O, arXiv:2306.14048", (("h2o", "window"),)),
    Claim(
        "chance",
        "Heavy hitters over entries by chance, with the same recent half and the same sinks",
        "ours, to see what the sum of attention is worth",
        (("h2o", "random:recent=0.5"),),
    ),
    Claim(
        "pool",
        "A pool of 21 neighbours over the paper's 7",
        "ours: answers of several tokens",
        (("snapkv", "snapkv:kernel=7"),),
    ),
    Claim(
        "forget",
        "Sums of attention that forget over sums that do not",
        "A2SF, arXiv:2407.20485",
        (("h2o:decay=0.9", "h2o"), ("h2o:decay=0.9", "window")),
    ),
    Claim(
        "needles",
        "The prompt's last queries over sinks and newest, for facts in the middle of the text",
        "SnapKV, arXiv:2404.14469",
        (("snapkv", "streaming"),),
        middle=True,
    ),
)

#: The places of the comparisons with kvpress on the page: as many entries kept, and as many bytes held.
PEERS, AT_BYTES = "kvpress", "kvpress-bytes"


#: In `ClaimResult.budget`: the mean over all budgets.
ALL = "all"
#: In `ClaimResult.protocol`: where perplexities are compared, and not answers.
TEXT = "text"
#: Share by which bytes of two sides may differ and still count as equal.
SAME_BYTES = 0.02
LOWEST, HIGHEST = 0.25, 0.75  #: depth of a fact in the middle of the text

Side = Callable[[SummaryRow], bool]


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """One pair in one protocol at one budget.

    Attributes:
        claim: `Claim.name`, `PEERS` or `AT_BYTES`. first, second: the candidates; peer: whose the second one is.
        protocol, budget: where; `TEXT` for perplexities, "all" for the mean over budgets. tasks: that were compared.
        mean, low, high, n: as in `Difference`; of perplexities the nats by which the first one's logarithm is lower.
        held, other_held: mean bytes held, over those of the full cache.
        masks_only: the second one hides entries and does not free them.
    """

    claim: str
    first: str
    second: str
    peer: str
    protocol: str
    budget: str
    tasks: tuple[str, ...]
    mean: float
    low: float
    high: float
    n: int
    held: float
    other_held: float
    masks_only: bool = False

    @property
    def more_held(self) -> float:
        """Bytes that the first one holds beyond the second's, as a share of these."""
        return self.held / self.other_held - 1 if self.other_held else math.inf

    @property
    def at_equal_bytes(self) -> bool:
        """Both sides really hold as many bytes, within `SAME_BYTES`."""
        return not self.masks_only and abs(self.more_held) <= SAME_BYTES

    @property
    def difference(self) -> Difference:
        """With its verdict."""
        return Difference(self.mean, self.low, self.high, self.n)


class Runs:
    """Rows and records of any number of folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Read them.

        Raises:
            DataError: a file cannot be read, or a folder has no records.
        """
        self.rows: list[SummaryRow] = []
        self._records: dict[str, list[Record]] = {}
        for folder in folders:
            records = read_samples(folder)
            if not records:
                raise DataError(f"{folder} holds no samples.jsonl; compare where millpond eval has run")
            self.rows += [row for row in read_rows(folder) if row.budget]
            for record in records:
                self._records.setdefault(record.cell, []).append(record)
        # parts of a run that were put together may hold a record twice
        for cell, own in self._records.items():
            self._records[cell] = list({(record.sample, record.question): record for record in own}.values())

    def of(self, cell: Cell) -> list[Record]:
        """The records of a cell."""
        return self._records.get(cell.key, [])

    def findings(self) -> list[ClaimResult]:
        """Every claim and every counterpart of which both sides are there.

        Budgets in shares of a prompt and in entries are kept apart. Ours against kvpress is `PEERS` at shares, where
        as many entries are kept, and `AT_BYTES` at numbers of entries: whole pages, so that equal entries are equal
        bytes where every head and layer has as many (`ClaimResult.at_equal_bytes`). A claim is measured at shares, or
        else at entries.
        """
        shares = [row for row in self.rows if Budget.parse(row.budget).kind == "ratio"]
        entries = [row for row in self.rows if Budget.parse(row.budget).kind == "tokens"]
        found = [
            finding
            for claim in CLAIMS
            for first, second in claim.pairs
            for finding in self._measured(claim.name, first, second, claim.middle, shares, entries)
        ]
        ours = dict.fromkeys(name for name in PRESSES | ALIKE if any(row.method == name for row in self.rows))
        for name, rows in ((PEERS, shares), (AT_BYTES, entries)):
            found += [one for first in ours for one in self._compare(name, first, _press(first), False, rows)]
        return found

    def _measured(
        self,
        claim: str,
        first: str,
        second: str,
        middle: bool,
        shares: Sequence[SummaryRow],
        entries: Sequence[SummaryRow],
    ) -> list[ClaimResult]:
        found = list(self._compare(claim, first, _named(second), middle, shares))
        known = {finding.protocol for finding in found}
        more = self._compare(claim, first, _named(second), middle, entries)
        return found + [finding for finding in more if finding.protocol not in known]

    def _compare(
        self, claim: str, first: str, second: Side, middle: bool, rows: Sequence[SummaryRow]
    ) -> Iterator[ClaimResult]:
        for where in dict.fromkeys(map(_where, rows)):
            here = [row for row in rows if _where(row) == where]
            mine = {(row.budget, row.task): row for row in here if _named(first)(row)}
            other = {(row.budget, row.task): row for row in here if second(row)}
            both = [place for place in mine if place in other]
            budgets = list(dict.fromkeys(budget for budget, _ in both))
            for chosen in [*([budget] for budget in budgets), budgets]:
                places = [place for place in both if place[0] in chosen]
                label = chosen[0] if len(chosen) == 1 and chosen is not budgets else ALL
                pairs = [(mine[place], other[place]) for place in places]
                if pairs:
                    yield from self._finding(claim, label, pairs, middle)

    def _finding(
        self, claim: str, budget: str, pairs: Sequence[tuple[SummaryRow, SummaryRow]], middle: bool
    ) -> Iterator[ClaimResult]:
        sides = self._by_task([row for row, _ in pairs], middle), self._by_task([row for _, row in pairs], middle)
        if not sides[0]:
            return  # no task says where its facts lie
        first, second = pairs[0]
        better, worse = sides if first.better == "higher" else sides[::-1]
        found = difference(better, worse, first.seed, shares=first.better == "higher")
        yield ClaimResult(
            claim,
            first.method,
            second.method,
            second.peer,
            _where(first),
            budget,
            tuple(sides[0]),
            **asdict(found),
            held=_held([row for row, _ in pairs]),
            other_held=_held([row for _, row in pairs]),
            masks_only=any(row.masks_only for _, row in pairs),
        )

    def _by_task(self, rows: Sequence[SummaryRow], middle: bool) -> Mapping[str, list[Record]]:
        tasks: dict[str, list[Record]] = {}
        for row in rows:
            own = [record for record in self.of(cell_of(row)) if not middle or _in_the_middle(record)]
            if own:
                tasks.setdefault(row.task, []).extend(own)
        return tasks


def _where(row: SummaryRow) -> str:
    return row.protocol if row.better == "higher" else TEXT


def _named(method: str) -> Side:
    return lambda row: row.method == method and row.peer == "millpond"


def _press(of: str) -> Side:
    return lambda row: is_press(row.method, of, row.peer)


def _in_the_middle(record: Record) -> bool:
    depth = record.facts.get("depth")
    depths = depth if isinstance(depth, list) else [] if depth is None else [depth]
    return bool(depths) and all(LOWEST <= float(one) <= HIGHEST for one in depths)


def _held(rows: Sequence[SummaryRow]) -> float:
    whole = sum(row.full_kv_bytes for row in rows)
    return sum(row.kv_bytes for row in rows) / whole if whole else 0.0


def renewed(before: Sequence[ClaimResult], found: Sequence[ClaimResult]) -> list[ClaimResult]:
    """What is `found` instead of what was known of the same pairs in the same protocols; the rest stays.

    All come in the order before, new pairs after those known.
    """
    measured = {(_pair(finding), finding.protocol) for finding in found}
    both = [*(finding for finding in before if (_pair(finding), finding.protocol) not in measured), *found]
    pairs, protocols = (
        {key: place for place, key in enumerate(dict.fromkeys(map(of, [*before, *found])))} for of in (_pair, _protocol)
    )
    return sorted(both, key=lambda finding: (pairs[_pair(finding)], protocols[_protocol(finding)]))


def _pair(finding: ClaimResult) -> tuple[str, ...]:
    return finding.claim, finding.first, finding.second, finding.peer


def _protocol(finding: ClaimResult) -> str:
    return finding.protocol


def write_findings(path: Path, findings: Sequence[ClaimResult]) -> None:
    """Keep them as JSON, a line each."""
    lines = ",\n ".join(json.dumps(_rounded(asdict(finding))) for finding in findings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[\n {lines}\n]\n" if lines else "[]\n", encoding="utf-8")


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in values.items()}


def read_findings(path: Path) -> list[ClaimResult]:
    """What `write_findings` kept; none where there is no file.

    Raises:
        DataError: the file cannot be read.
    """
    if not path.exists():
        return []
    try:
        return [ClaimResult(**{**item, "tasks": tuple(item["tasks"])}) for item in read_json(path)]
    except (TypeError, KeyError) as error:
        raise DataError(f"{path} is not a list of findings ({error})") from error
