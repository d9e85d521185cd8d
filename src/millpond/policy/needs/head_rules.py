"""Protocol of policies whose KV heads have their own decoding rules (FastGen)."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

from torch import Tensor

from millpond.policy.protect import Protect
from millpond.policy.token_classes import TokenClasses


class HeadRule(IntEnum):
    """What a head keeps; each kind keeps all that the one before it does."""

    SPECIAL = 0  #: special tokens
    PUNCTUATION = 1  #: and punctuation
    FREQUENT = 2  #: and the entries of most accumulated attention
    LOCAL = 3  #: and the newest
    FULL = 4  #: everything


class Heads(NamedTuple):
    """The heads of some sequences at one moment."""

    value: Tensor  #: (S, H, N) float32, accumulated attention
    positions: Tensor  #: (S, H, N) int32, -1 for none
    classes: Tensor  #: (S, H, N) int8, see `TokenClasses.of`
    kinds: Tensor  #: (S, H) int
    seen: Tensor  #: (S,) int, tokens so far
    local: Tensor  #: (S,) int, newest positions that `HeadRule.LOCAL` keeps
    most: Tensor  #: (S,) int64, entries that all heads of a sequence may hold together


class HeadRules(Protocol):
    """What heads of each kind keep while decoding."""

    @property
    def threshold(self) -> float:
        """Share of its attention that a head's kind must recover; 1 keeps everything."""
        ...

    @property
    def queries(self) -> int:
        """Recovery is measured on at most this many of the prompt's queries; 0 for all."""
        ...

    @property
    def classes(self) -> TokenClasses:
        """Classes of token ids."""
        ...

    @property
    def protect(self) -> Protect:
        """What no rule evicts."""
        ...

    def classes_of(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The class of each entry; the first positions count as special tokens."""
        ...

    def quota(self, seen: Tensor) -> Tensor:
        """(S,) int64: how many frequent entries a head may keep of `seen` (S,) tokens."""
        ...

    def leaving(self, heads: Heads) -> Tensor:
        """(S, H, N) bool: the entries that their head does not keep."""
        ...
