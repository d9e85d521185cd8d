"""Token ids by class: special tokens and punctuation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.option_ranges import Range, brief

#: Classes of tokens, by what they are worth to a head that keeps few.
OTHER, PUNCTUATION, SPECIAL = 0, 1, 2
#: Token ids that options may name, of more tokens than any vocabulary has, their digits, and how many of them.
IDS, ID_DIGITS, MAX_IDS = Range(0, 2**22), 7, 4_096


@dataclass(frozen=True, slots=True)
class TokenClasses:
    """Ids of the special tokens and of punctuation; None until a tokenizer is read.

    An id in both is special.

    Example:
        >>> TokenClasses(frozenset({0}), frozenset({3})).of(torch.tensor([0, 1, 3, 9])).tolist()
        [2, 0, 1, 0]
    """

    special: frozenset[int] | None = None
    punctuation: frozenset[int] | None = None

    @property
    def known(self) -> bool:
        """Whether no tokenizer is needed."""
        return self.special is not None and self.punctuation is not None

    def of(self, ids: Tensor) -> Tensor:
        """Return the class of each id, int8 of the same shape."""
        table = self.table(ids.device)
        return table[ids.clamp(0, len(table) - 1)]

    def table(self, device: torch.device) -> Tensor:
        """Return (c,) int8: the class of each id, the last for all further ids."""
        assert self.special is not None, "the classes are known before a cache uses them"
        assert self.punctuation is not None, "the classes are known before a cache uses them"
        return _table(self.special, self.punctuation, device)


def parse_ids(name: str, text: str) -> frozenset[int] | None:
    """Return the token ids of "0;1;2"; None for "auto", and no id for "none".

    Raises:
        OptionError: something else.
    """
    if text in ("auto", "none"):
        return None if text == "auto" else frozenset()
    parts = text.split(";", MAX_IDS)
    if len(parts) > MAX_IDS:
        raise OptionError(f"{name} names more than {MAX_IDS:,} token ids")
    try:
        ids = frozenset(int(part) for part in parts)
    except ValueError:
        ids = frozenset({-1})
    if not (IDS.holds(min(ids)) and IDS.holds(max(ids))):
        raise OptionError(
            f"{name}={brief(text)} must be token ids, {IDS}, such as 0;1;2, or auto for the tokenizer's, or none"
        )
    return ids


@lru_cache(maxsize=16)
def _table(special: frozenset[int], punctuation: frozenset[int], device: torch.device) -> Tensor:
    """Return the class by id, with one id more than is named, which stands for all others."""
    table = torch.zeros(max([*special, *punctuation, -1]) + 2, dtype=torch.int8)
    for ids, kind in ((punctuation, PUNCTUATION), (special, SPECIAL)):
        table[_listed(ids)] = kind
    return table.to(device)


def _listed(ids: Iterable[int]) -> Tensor:
    return torch.tensor(sorted(ids), dtype=torch.long)
