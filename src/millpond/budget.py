"""Budgets of a cache, parsed once at the boundary."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from millpond.errors import BudgetError
from millpond.option_ranges import Range, brief
from millpond.scalar import number

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?|\.\d+)\s*(%|[a-zA-Z]*)\s*(?:,\s*at least (\d+)\s*)?$")
#: Of "20%", 512 and "64MiB": what is kept of the longest text, and what no memory holds.
RANGES = {"ratio": Range(0, 1, above=True), "tokens": Range(1, 2**30), "bytes": Range(1, 2**60)}
#: Characters of a budget at most: a number, a unit and "at least".
_LONGEST = 100
_NAMES = {"ratio": "a ratio", "tokens": "tokens", "bytes": "bytes"}
_WAY_OUT = 'write "20%" (of each prompt), 512 (tokens per KV head) or "64MiB" (the whole cache)'


@dataclass(frozen=True, slots=True)
class Budget:
    """Entries to keep per KV head, as tokens, a share of each prompt, or bytes of the cache.

    Attributes:
        kind: "tokens", "ratio" or "bytes".
        amount: Tokens >= 1, a share in (0, 1], or bytes >= 1.
        at_least: Least tokens of a prompt that are kept under a share, however short the prompt is.

    Example:
        >>> Budget.parse("20%")
        Budget(kind='ratio', amount=0.2, at_least=0)
        >>> Budget.parse("2GiB").amount
        2147483648
    """

    kind: Literal["tokens", "ratio", "bytes"]
    amount: float | int
    at_least: int = 0

    @classmethod
    def parse(cls, text: str | int | float | Budget) -> Budget:
        """Return the budget that a user writes.

        "20%", 512, "512", "64MiB", or a number in (0, 1] with a point as a ratio. Numbers may be numpy's or torch's.
        "20%, at least 512" is a ratio of long prompts and 512 tokens of short ones.

        Raises:
            BudgetError: the text is not a budget, or its amount is out of range.
        """
        if isinstance(text, Budget):
            return text
        if isinstance(text, str) and text.strip() == "auto":
            raise BudgetError(
                f"budget 'auto' is read from a table of 'millpond fit', which nothing reads here; {_WAY_OUT}"
            )
        user_text = number(text)
        if isinstance(user_text, int) and not isinstance(user_text, bool):
            return cls._checked("tokens", user_text, user_text)
        if isinstance(user_text, float):
            return cls._checked("ratio", user_text, user_text)
        match = _PATTERN.match(user_text) if isinstance(user_text, str) and len(user_text) <= _LONGEST else None
        if not match:
            raise BudgetError(f"budget {brief(text)} is not a budget; {_WAY_OUT}")
        amount, unit = float(match[1]), match[2].lower()
        ratio = unit == "%" or (not unit and "." in match[1])
        if match[3] is not None and not ratio:
            raise BudgetError(f'budget {text!r}: "at least" belongs to a share of the prompt; {_WAY_OUT}')
        if ratio:
            return cls._checked("ratio", amount / 100 if unit else amount, text, int(match[3] or 0))
        if unit in ("", "tokens", "token"):
            if amount != int(amount):
                raise BudgetError(f"budget {text!r} is neither whole tokens nor a share; {_WAY_OUT}")
            return cls._checked("tokens", int(amount), text)
        if unit not in _UNITS:
            raise BudgetError(f"budget {text!r} has the unknown unit {match[2]!r}; {_WAY_OUT}")
        return cls._checked("bytes", int(amount * _UNITS[unit]), text)

    @classmethod
    def _checked(
        cls, kind: Literal["tokens", "ratio", "bytes"], amount: float | int, text: object, at_least: int = 0
    ) -> Budget:
        if not RANGES[kind].holds(amount):
            raise BudgetError(f"budget {brief(text)}: {_NAMES[kind]} must be {RANGES[kind]}; {_WAY_OUT}")
        if at_least > RANGES["tokens"].high:
            raise BudgetError(f"budget {brief(text)}: tokens must be {RANGES['tokens']}; {_WAY_OUT}")
        return cls(kind, amount, at_least)

    def entries(self, seen: int) -> int:
        """Return entries per KV head for a sequence of `seen` tokens.

        A ratio rounds to the nearest whole entry, at least 1 and `at_least`. Bytes have no such meaning; the cache
        turns them into tokens first.
        """
        if self.kind == "ratio":
            return max(1, self.at_least, math.floor(self.amount * seen + 0.5))
        if self.kind == "tokens":
            return int(self.amount)
        raise BudgetError("a budget in bytes must be turned into tokens by the cache before it is used")

    def floored(self, min_entries: int) -> Budget:
        """Return the budget with at least `min_entries` of a prompt if it is a bare share."""
        return replace(self, at_least=min_entries) if self.kind == "ratio" and not self.at_least else self

    def __str__(self) -> str:
        if self.kind == "ratio":
            return f"{100 * self.amount:g}%" + (f", at least {self.at_least}" if self.at_least else "")
        return f"{self.amount} tokens" if self.kind == "tokens" else f"{self.amount} bytes"


#: Tokens that a share keeps at least in chats and servers: a share of a short text is too little to answer from.
FLOOR = 512
#: What is kept where no budget is given, wherever that is.
DEFAULT = Budget("ratio", 0.2, at_least=FLOOR)


def parse_bytes(text: str | int) -> int:
    """Return bytes from "2GiB" or a plain number of bytes.

    Raises:
        BudgetError: not an amount of bytes.
    """
    user_text = number(text)
    if isinstance(user_text, int) and not isinstance(user_text, bool):
        return int(Budget._checked("bytes", user_text, user_text).amount)
    if isinstance(user_text, str) and (len(user_text) > _LONGEST or not _PATTERN.match(user_text)):
        raise BudgetError(f'{brief(text)} is not an amount of bytes; write a number with a unit, such as "64MiB"')
    budget = Budget.parse(text)
    if budget.kind != "bytes":
        raise BudgetError(f'{text!r} is not an amount of bytes; write a number with a unit, such as "64MiB"')
    return int(budget.amount)
