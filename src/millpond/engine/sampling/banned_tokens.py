"""Tokens that a request forbids: early ends, bad words, and all that are not allowed."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millpond.engine.sampling.params import SamplingParams
from millpond.errors import OptionError
from millpond.kernels.transfers import on_device

#: Most tokens of a bad word.
MAX_WORD_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Bans:
    """Tokens that the parameters of one request forbid.

    Attributes:
        min_tokens: Tokens of an answer before which `early` is forbidden.
        early: Ids that may not come before there are `min_tokens`, (E,).
        never: Ids that may not come at all, (N,).
        after: Tokens -> the ids that may not follow them.
        lengths: Numbers of those tokens, each once, ascending.
        others: True at the ids that are not allowed, (M,), as is every id from M on; None: all are allowed.
    """

    min_tokens: int
    early: Tensor
    never: Tensor
    after: Mapping[tuple[int, ...], tuple[int, ...]]
    lengths: tuple[int, ...]
    others: Tensor | None

    @classmethod
    def of(cls, params: SamplingParams, tokenizer: Any, ends: Collection[int]) -> Bans | None:
        """Return the tokens that `params` forbid; None: none.

        Args:
            params: Parameters of the request.
            tokenizer: Tokenizer of the model, or None.
            ends: Ids that end a text.

        Raises:
            OptionError: words without a tokenizer, or one of more than `MAX_WORD_TOKENS` tokens.
        """
        if not params.forbids:
            return None
        early = set(params.stop_token_ids).union(() if params.ignore_eos else ends) if params.min_tokens else ()
        sequences = sequences_of(params.bad_words, tokenizer)
        after: dict[tuple[int, ...], tuple[int, ...]] = {}
        for *prefix, last in sequences:
            after[*prefix,] = (*after.get((*prefix,), ()), last)
        never = after.pop((), ())
        lengths = tuple(sorted({len(prefix) for prefix in after}))
        return cls(params.min_tokens, _ids(early), _ids(never), after, lengths, _others(params.allowed_token_ids))

    def over(self, n_tokens: int) -> bool:
        """Return whether no token is banned after `n_tokens` tokens."""
        return n_tokens >= self.min_tokens and not (len(self.never) or self.after or self.others is not None)

    def apply_(self, row: Tensor, last_tokens: Sequence[int], n_tokens: int) -> None:
        """Forbid in the logits (V,), float32, in place.

        Args:
            row: Logits of one answer.
            last_tokens: Last tokens of the answer.
            n_tokens: Number of all its tokens.
        """
        if self.others is not None:
            row[: len(self.others)].masked_fill_(on_device(self.others, row.device), float("-inf"))
            row[len(self.others) :] = float("-inf")
        banned = [self.early] if n_tokens < self.min_tokens else []
        followers = [
            last for n in self.lengths if n <= len(last_tokens) for last in self.after.get((*last_tokens[-n:],), ())
        ]
        for ids in (*banned, self.never, _ids(followers)):
            if len(ids):
                row.index_fill_(
                    0, on_device(ids[ids < len(row)], row.device), float("-inf")
                )  # a tokenizer may have more than the model


@dataclass(slots=True)
class _Answer:
    bans: Bans
    tokens: list[int]
    n: int = 0


class Forbidden:
    """Bans of every completion that has any, and its last tokens."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, _Answer] = {}

    def start(self, key: Hashable, bans: Bans) -> None:
        """Add a completion that begins."""
        self._answers[key] = _Answer(bans, [])

    def stop(self, key: Hashable) -> None:
        """Remove a completion."""
        self._answers.pop(key, None)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._answers

    def apply_(self, keys: Sequence[Hashable], logits: Tensor) -> None:
        """Forbid in the logits (S, V), float32, in place; rows of other keys stay unchanged."""
        for i, key in enumerate(keys):
            if key in self._answers:
                answer = self._answers[key]
                answer.bans.apply_(logits[i], answer.tokens, answer.n)

    def count(self, keys: Sequence[Hashable], tokens: Sequence[int]) -> None:
        """Record the tokens that were chosen, one per key."""
        if not self._answers:
            return
        for key, token in zip(keys, tokens, strict=True):
            if key in self._answers:
                answer = self._answers[key]
                answer.n += 1
                longest = answer.bans.lengths[-1] if answer.bans.lengths else 0
                answer.tokens = [*answer.tokens, token][-longest:] if longest else []
                if answer.bans.over(answer.n):
                    del self._answers[key]


def sequences_of(words: Sequence[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """Return the tokens of each word, at the beginning of a text and after a space.

    Words that the vocabulary cannot spell are left out.

    Raises:
        OptionError: there is no tokenizer, or a word has more than `MAX_WORD_TOKENS` tokens.
    """
    if not words:
        return []
    if tokenizer is None:
        raise OptionError("bad_words needs a tokenizer; forbid token ids with logit_bias, or give allowed_token_ids")
    texts = [blank + word.lstrip() for word in words for blank in ("", " ")]
    sequences = [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    for text, ids in zip(texts, sequences, strict=True):
        if len(ids) > MAX_WORD_TOKENS:
            raise OptionError(f"bad_words holds {text!r} of {len(ids)} tokens; a word may have {MAX_WORD_TOKENS}")
    unknown = getattr(tokenizer, "unk_token_id", None)
    return list(dict.fromkeys(ids for ids in sequences if ids and unknown not in ids))


def _others(allowed: Sequence[int] | None) -> Tensor | None:
    if allowed is None:
        return None
    others = torch.ones(max(allowed) + 1, dtype=torch.bool)
    others[torch.tensor(allowed)] = False
    return others


def _ids(tokens: Collection[int]) -> Tensor:
    return torch.tensor(sorted(tokens), dtype=torch.long)
