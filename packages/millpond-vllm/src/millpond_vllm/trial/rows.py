"""Rows of a trial: what one setting made of the traffic, and how it compares with vLLM alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from millpond import DataError


@dataclass(frozen=True, slots=True)
class TrialRow:
    """What one setting made of the traffic.

    Attributes:
        setting: "stock", or "method:budget".
        load: Hash of the traffic and of all that rows must have in common to be compared.
        tokens: New tokens of each request.
        prompt_tokens: Tokens of all prompts.
        seconds: Time from the first request to the last answer.
        at_once: Requests that ran at once, on average over the steps in which others waited; over all steps if none
            ever did.
        most_at_once: Most requests that ran at once.
        freed_tokens: Tokens of the blocks that evictions gave back.
    """

    setting: str
    load: str
    tokens: list[list[int]]
    prompt_tokens: int
    seconds: float
    at_once: float
    most_at_once: int
    freed_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds if self.seconds else 0.0

    @property
    def kept(self) -> float:
        """Share of the tokens' entries that was never given back."""
        whole = self.prompt_tokens + sum(map(len, self.tokens))
        return 1 - self.freed_tokens / whole if whole else 1.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """How answers compare with those of vLLM alone.

    Attributes:
        prefix: Mean over requests of the share of the answer that is equal from its beginning on.
        equal: Share of the requests whose whole answer is equal.
    """

    prefix: float
    equal: float


def agreement(row: TrialRow, stock: TrialRow) -> Agreement:
    """Return how the answers of a row compare with those of vLLM alone.

    Example:
        >>> one = TrialRow("stock", "", [[1, 2, 3, 4], [5]], 8, 1.0, 1.0, 1, 0)
        >>> other = TrialRow("h2o:20%", "", [[1, 2, 9, 4], [5]], 8, 1.0, 1.0, 1, 4)
        >>> agreement(other, one)
        Agreement(prefix=0.75, equal=0.5)
    """
    shares = [_equal_prefix(*pair) for pair in zip(row.tokens, stock.tokens, strict=True)]
    equal = [a == b for a, b in zip(row.tokens, stock.tokens, strict=True)]
    return Agreement(sum(shares) / len(shares), sum(equal) / len(equal))


def _equal_prefix(tokens: Sequence[int], stock: Sequence[int]) -> float:
    length = max(len(tokens), len(stock))
    pairs = enumerate(zip(tokens, stock, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(tokens), len(stock)))
    return same / length if length else 1.0


def smallest(rows: Sequence[TrialRow], stock: TrialRow, target: float) -> TrialRow | None:
    """Return the row that keeps the least of those whose equal prefix reaches `target`; None if there is none."""
    good = [row for row in rows if row.setting != stock.setting and agreement(row, stock).prefix >= target]
    return min(good, key=lambda row: row.kept, default=None)


def read_rows(path: Path, load: str) -> list[TrialRow]:
    """Return the rows of a file that belong to this traffic.

    Raises:
        DataError: the file cannot be read, or has a line that is no row.
    """
    if not path.exists():
        return []
    known = {one.name for one in fields(TrialRow)}
    rows = []
    try:
        for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            given: Any = json.loads(line)
            if not isinstance(given, dict) or set(given) != known:
                raise DataError(f"{path.name}, line {at}: no row of a trial; give --out another file")
            rows.append(TrialRow(**given))
    except (OSError, ValueError) as error:
        raise DataError(f"rows {str(path)!r} cannot be read: {error}") from error
    return [row for row in rows if row.load == load]


def add_row(path: Path, row: TrialRow) -> None:
    """Append a row to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")
