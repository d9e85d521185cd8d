"""Budget: how much a cache may keep, parsed once at the border."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from millpond.errors import BudgetError

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(%|[a-zA-Z]*)\s*$")
_WAY_OUT = 'write "20%" (of each prompt), 512 (tokens per KV head) or "64MiB" (the whole cache)'


@dataclass(frozen=True, slots=True)
class Budget:
    """Entries to keep per KV head (tokens), as a share of each sequence's own prompt, or as bytes of the whole cache.

    Attributes:
        kind: "tokens", "ratio" or "bytes".
        amount: tokens >= 1, a share in (0, 1], or bytes >= 1.

    Example:
        >>> Budget.parse("20%")
        Budget(kind='ratio', amount=0.2)
        >>> Budget.parse("2GiB").amount
        2147483648
    """

    kind: Literal["tokens", "ratio", "bytes"]
    amount: float | int

    @classmethod
    def parse(cls, text: str | int | float | Budget) -> Budget:
        """A budget from what a user writes: "20%", 512, "512", "64MiB", or a float in (0, 1] as a ratio.

        Raises:
            BudgetError: the text is not a budget, or its amount is out of range.
        """
        if isinstance(text, Budget):
            return text
        if isinstance(text, bool):
            raise BudgetError(f"budget {text!r} is not a budget; {_WAY_OUT}")
        if isinstance(text, int):
            return cls._checked("tokens", text, text)
        if isinstance(text, float):
            return cls._checked("ratio", text, text)
        found = _PATTERN.match(text)
        if not found:
            raise BudgetError(f"budget {text!r} is not a budget; {_WAY_OUT}")
        number, unit = float(found[1]), found[2].lower()
        if unit == "%":
            return cls._checked("ratio", number / 100, text)
        if unit in ("", "tokens", "token"):
            if number != int(number):
                raise BudgetError(f"budget {text!r} is neither whole tokens nor a share; {_WAY_OUT}")
            return cls._checked("tokens", int(number), text)
        if unit not in _UNITS:
            raise BudgetError(f"budget {text!r} has the unknown unit {found[2]!r}; {_WAY_OUT}")
        return cls._checked("bytes", int(number * _UNITS[unit]), text)

    @classmethod
    def _checked(cls, kind: Literal["tokens", "ratio", "bytes"], amount: float | int, text: object) -> Budget:
        if kind == "ratio" and not 0 < amount <= 1:
            raise BudgetError(f"budget {text!r}: a ratio must lie in (0, 1]; {_WAY_OUT}")
        if kind != "ratio" and amount < 1:
            raise BudgetError(f"budget {text!r}: must be at least 1; {_WAY_OUT}")
        return cls(kind, amount)

    def entries(self, seen: int) -> int:
        """Entries per KV head for a sequence of `seen` tokens: a ratio rounds to the nearest whole entry, at least 1.

        Bytes have no such meaning; the cache turns them into tokens first.
        """
        if self.kind == "ratio":
            return max(1, math.floor(self.amount * seen + 0.5))
        if self.kind == "tokens":
            return int(self.amount)
        raise BudgetError("a budget in bytes must be turned into tokens by the cache before it is used")

    def __str__(self) -> str:
        if self.kind == "ratio":
            return f"{100 * self.amount:g}%"
        return f"{self.amount} tokens" if self.kind == "tokens" else f"{self.amount} bytes"


def parse_bytes(text: str | int) -> int:
    """Bytes from "2GiB" or a plain number of bytes.

    Raises:
        BudgetError: not an amount of bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return int(Budget._checked("bytes", text, text).amount)
    budget = Budget.parse(text)
    if budget.kind != "bytes":
        raise BudgetError(f'{text!r} is not an amount of bytes; write a number with a unit, such as "64MiB"')
    return int(budget.amount)
