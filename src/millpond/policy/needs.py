"""Needs of policies besides keys, values and attention, and the protocols of the signals that meet them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from millpond.kernels.eager.softmax import soft_cap, softmax_with_sink, wide
from millpond.policy.prompt_flags import PromptFlags
from millpond.policy.protect import Protect
from millpond.policy.token_classes import TokenClasses


class AlwaysSeen(Protocol):
    """Entries that every query sees: sinks, the newest, and those that fill no block yet."""

    @property
    def sinks(self) -> int:
        """First positions of the text."""
        ...

    @property
    def block(self) -> int:
        """Entries that are looked up together."""
        ...

    def local(self, budget: int) -> int:
        """Return the newest positions that a query sees, its own among them."""
        ...

    def blocks(self, budget: int) -> int:
        """Return how many blocks fit besides the entries that every query sees."""
        ...


#: Where blocks lie that queries look up: in the pool, in host memory or in files; "auto": in host memory where the pool
#: is that of an accelerator, or where blocks are stored in a number format.
Offload = Literal["auto", "none", "host", "disk"]


class BlockLookup(Protocol):
    """Making, comparing and looking up of blocks of entries."""

    @property
    def protect(self) -> AlwaysSeen:
        """Entries that every query sees."""
        ...

    @property
    def representatives(self) -> int:
        """Entries of a block whose mean key stands for it."""
        ...

    @property
    def together(self) -> int:
        """Queries of a prompt that look up one set of blocks."""
        ...

    @property
    def offload(self) -> Offload:
        """Where blocks lie."""
        ...

    @property
    def far(self) -> Literal["one_distance", "true"]:
        """Position of looked-up entries: one distance after the local ones, or their own."""
        ...


class HeadRule(IntEnum):
    """Rule of a head; each rule keeps all that the one before it does."""

    SPECIAL = 0  #: special tokens
    PUNCTUATION = 1  #: and punctuation
    FREQUENT = 2  #: and the entries of most accumulated attention
    LOCAL = 3  #: and the newest
    FULL = 4  #: everything


class Heads(NamedTuple):
    """Heads of some sequences at one moment."""

    value: Tensor  #: (S, H, N) float32, accumulated attention
    positions: Tensor  #: (S, H, N) int32, -1 for none
    classes: Tensor  #: (S, H, N) int8, see `TokenClasses.of`
    kinds: Tensor  #: (S, H) int
    seen: Tensor  #: (S,) int, tokens so far
    local: Tensor  #: (S,) int, newest positions that `HeadRule.LOCAL` keeps
    most: Tensor  #: (S,) int64, entries that all heads of a sequence may hold together


class HeadRules(Protocol):
    """Rules by which heads decode."""

    @property
    def threshold(self) -> float:
        """Share of its attention that a head's rule must recover; 1 keeps everything."""
        ...

    @property
    def queries(self) -> int:
        """Most of the prompt's queries that recovery is measured on; 0 for all."""
        ...

    @property
    def classes(self) -> TokenClasses:
        """Classes of token ids."""
        ...

    @property
    def protect(self) -> Protect:
        """Entries that no rule evicts."""
        ...

    def classes_of(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the class of each entry; the first positions count as special tokens."""
        ...

    def quota(self, seen: Tensor) -> Tensor:
        """Return (S,) int64: how many frequent entries a head may keep of `seen` (S,) tokens."""
        ...

    def leaving(self, heads: Heads) -> Tensor:
        """Return (S, H, N) bool: the entries that their head does not keep."""
        ...


#: Rows of queries that attend to one set of entries.
BLOCK = 64


class HeadPrompt(NamedTuple):
    """Queries of one head at positions N - Q .. N - 1, and all keys of its KV head."""

    q: Tensor  #: (Q, D)
    k: Tensor  #: (N, D)
    scale: float
    softcap: float = 0.0
    sink_logit: Tensor | None = None  #: a logit that only enters the denominator, of one number

    @property
    def first(self) -> int:
        """Position of the first query."""
        return len(self.k) - len(self.q)

    def last_rows(self, n: int) -> Tensor:
        """Return (n, N): the attention of the last n queries."""
        kind = wide(self.q.dtype)
        logits = soft_cap(self.q[-n:].to(kind) @ self.k.to(kind).T * self.scale, self.softcap)
        column = torch.arange(len(self.k), device=self.q.device)
        sink = None if self.sink_logit is None else self.sink_logit.to(kind).view(1, 1)
        return softmax_with_sink(logits, column <= column[-n:, None], sink)[0]


#: Of the queries at positions begin .. end - 1, one block: positions (n,) that they attend to, ascending. Each query
#: sees those that are not after it and that `Pattern.near` does not hide from it.
Look = Callable[[int, int], Tensor]


class Pattern(Protocol):
    """Attention pattern of a head on a prompt."""

    @property
    def near(self) -> tuple[int, int] | None:
        """(first, width): entries from `first` reach queries less than `width` after; None: all."""
        ...

    def covers(self, n: int) -> bool:
        """Whether every query of a text of `n` tokens sees everything."""
        ...

    def scaled(self, ratio: float) -> Pattern:
        """Return the pattern with `ratio` times as many entries."""
        ...

    def look(self, prompt: HeadPrompt) -> Look:
        """Return the entries that the queries of a prompt attend to.

        One tensor per block of BLOCK rows from the first query on.
        """
        ...


class PromptPatterns(Protocol):
    """Attention patterns of each layer's heads on a prompt."""

    def patterns(self, layer: int, n_heads: int) -> list[Pattern]:
        """Return the pattern of each query head of a layer.

        Raises:
            CacheMismatchError: a head is named that there is not.
        """
        ...


@dataclass(frozen=True, slots=True)
class PromptRepeat:
    """Second reading of each prompt or turn by the model before there is a plan.

    Attributes:
        ids: Token ids of the text that asks for the repetition; None until a tokenizer has encoded it.
        chunk: Tokens that are repeated in one pass.
        queries: Queries of the repetition that plans see, evenly spread; about as many at most. 0 for none.
    """

    ids: tuple[int, ...] | None
    chunk: int
    queries: int = 0


@dataclass(frozen=True, slots=True)
class Entropies:
    """Need for -log P of each token in the model's own predictions.

    Attributes:
        decay: Factor on every stored score when another round of a dialogue begins.
    """

    decay: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs of a policy beyond the keys, values and attention of one layer; default: none.

    Attributes:
        whole_prompt: A prompt is read in one pass, because the result depends on where it is cut.
        uncut: A caller may not cut a prompt either; `whole_prompt` goes with it.
        token_ids: Ids of all tokens that were read.
        entropies: Predictions of the model for all tokens.
        prompt_repeat: Second reading of each prompt.
        head_rules: Rule of its own for each KV head, and the queries of the prompt.
        block_lookup: Storage of everything; queries look blocks of it up.
        prompt_patterns: Storage of everything; the queries of a prompt attend to patterns of it.
        prompt_flags: Queries of a prompt that do not see entries without a flag.
    """

    whole_prompt: bool = False
    uncut: bool = False
    token_ids: bool = False
    entropies: Entropies | None = None
    prompt_repeat: PromptRepeat | None = None
    head_rules: HeadRules | None = None
    block_lookup: BlockLookup | None = None
    prompt_patterns: PromptPatterns | None = None
    prompt_flags: PromptFlags | None = None

    @property
    def later_text(self) -> bool:
        """Whether nothing can leave before the rest of a prompt is read."""
        return replace(self, prompt_flags=None) != NOTHING

    @property
    def whole_prompt_option(self) -> str:
        """Option of methods that evict inside a prompt with which nothing leaves before its end."""
        return "prefill='once'" if self.prompt_flags is None else "acts='end'"


#: What most policies need.
NOTHING = Needs()


class TokenSource(Protocol):
    """Facts about tokens, and encoding of a text."""

    def classes(self, given: TokenClasses) -> TokenClasses:
        """Return the classes of token ids, completed by those that the source knows.

        Raises:
            OptionError: a class is not given and not known.
        """
        ...

    def spell(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text.

        Raises:
            OptionError: they are not known.
        """
        ...
