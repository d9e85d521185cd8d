"""Tokens that a request forbids: early ends, bad words, and all that are not allowed."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millpond.engine.sampling.params import SamplingParams
from millpond.errors import OptionError

#: Most tokens of a bad word.
MOST_WORD_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Bans:
    """What the parameters of one request forbid.

    Attributes:
        early: (E,) ids that may not come before there are `min_tokens`. never: (N,) ids that may not come at all.
        after: tokens -> the ids that may not follow them. lengths: of those tokens, each once.
        others: (M,) true at the ids that are not allowed, as is every id from M on; None: all are.
    """

    min_tokens: int
    early: Tensor
    never: Tensor
    after: Mapping[tuple[int, ...], tuple[int, ...]]
    lengths: tuple[int, ...]
    others: Tensor | None

    @classmethod
    def of(cls, params: SamplingParams, tokenizer: Any, ends: Collection[int]) -> Bans | None:
        """What `params` forbid; None: nothing.

        Args:
            ends: ids that end a text.

        Raises:
            OptionError: words without a tokenizer, or one of more than `MOST_WORD_TOKENS` tokens.
        """
        if not params.forbids:
            return None
        early = set(params.stop_token_ids).union(() if params.ignore_eos else ends) if params.min_tokens else ()
        sequences = sequences_of(params.bad_words, tokenizer)
        after: dict[tuple[int, ...], tuple[int, ...]] = {}
        for *before, last in sequences:
            after[*before,] = (*after.get((*before,), ()), last)
        never = after.pop((), ())
        lengths = tuple(sorted({len(before) for before in after}))
        return cls(params.min_tokens, _ids(early), _ids(never), after, lengths, _others(params.allowed_token_ids))

    def over(self, n_said: int) -> bool:
        """Whether no token is banned after `n_said` tokens."""
        return n_said >= self.min_tokens and not (len(self.never) or self.after or self.others is not None)

    def apply_(self, row: Tensor, said: Sequence[int], n_said: int) -> None:
        """Forbid in the logits (V,), float32, in place.

        Args:
            said: the last tokens of the answer. n_said: how many there were.
        """
        if self.others is not None:
            row[: len(self.others)].masked_fill_(self.others.to(row.device), float("-inf"))
            row[len(self.others) :] = float("-inf")
        banned = [self.early] if n_said < self.min_tokens else []
        followers = [last for n in self.lengths if n <= len(said) for last in self.after.get((*said[-n:],), ())]
        for ids in (*banned, self.never, _ids(followers)):
            if len(ids):
                row[ids[ids < len(row)].to(row.device)] = float("-inf")  # a tokenizer may have more than the model


@dataclass(slots=True)
class _Said:
    bans: Bans
    tokens: list[int]
    n: int = 0


class Forbidden:
    """The bans of every completion that has any, and what it has said."""

    def __init__(self) -> None:
        self._of: dict[Hashable, _Said] = {}

    def start(self, key: Hashable, bans: Bans) -> None:
        """A completion begins."""
        self._of[key] = _Said(bans, [])

    def stop(self, key: Hashable) -> None:
        """Forget it."""
        self._of.pop(key, None)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._of

    def apply_(self, keys: Sequence[Hashable], logits: Tensor) -> None:
        """Forbid in the logits (S, V), float32, in place; rows of other keys stay as they are."""
        for i, key in enumerate(keys):
            if key in self._of:
                said = self._of[key]
                said.bans.apply_(logits[i], said.tokens, said.n)

    def count(self, keys: Sequence[Hashable], tokens: Sequence[int]) -> None:
        """The tokens that were chosen, one per key."""
        if not self._of:
            return
        for key, token in zip(keys, tokens, strict=True):
            if key in self._of:
                said = self._of[key]
                said.n += 1
                longest = said.bans.lengths[-1] if said.bans.lengths else 0
                said.tokens = [*said.tokens, token][-longest:] if longest else []
                if said.bans.over(said.n):
                    del self._of[key]


def sequences_of(words: Sequence[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """The tokens of each word, at the beginning of a text and behind a space; none of what the vocabulary cannot spell.

    Raises:
        OptionError: there is no tokenizer, or a word has more than `MOST_WORD_TOKENS` tokens.
    """
    if not words:
        return []
    if tokenizer is None:
        raise OptionError("bad_words needs a tokenizer; forbid token ids with logit_bias, or give allowed_token_ids")
    texts = [before + word.lstrip() for word in words for before in ("", " ")]
    found = [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    for text, ids in zip(texts, found, strict=True):
        if len(ids) > MOST_WORD_TOKENS:
            raise OptionError(f"bad_words holds {text!r} of {len(ids)} tokens; a word may have {MOST_WORD_TOKENS}")
    unknown = getattr(tokenizer, "unk_token_id", None)
    return list(dict.fromkeys(ids for ids in found if ids and unknown not in ids))


def _others(allowed: Sequence[int] | None) -> Tensor | None:
    if allowed is None:
        return None
    others = torch.ones(max(allowed) + 1, dtype=torch.bool)
    others[torch.tensor(allowed)] = False
    return others


def _ids(tokens: Collection[int]) -> Tensor:
    return torch.tensor(sorted(tokens), dtype=torch.long)
