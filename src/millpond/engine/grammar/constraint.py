"""Answers that follow a grammar, token by token, by the library xgrammar (extra `constrained`).

After each token the grammar says which tokens may come next; the others' logits become minus infinity. When the answer
is complete, only the tokens that end it are left.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from millpond.engine.grammar.compiler import Grammar


@dataclass(frozen=True, slots=True)
class _Followed:
    """Where one completion stands in its grammar."""

    matcher: Any
    grammar: Grammar


class Constraints:
    """Where each completion that has a grammar stands in it."""

    def __init__(self) -> None:
        self._followed: dict[Hashable, _Followed] = {}

    def start(self, key: Hashable, grammar: Grammar, ends: Collection[int]) -> None:
        """A completion begins; the ids in `ends` end it, where it is complete."""
        self._followed[key] = _Followed(_matcher(grammar, ends), grammar)

    def stop(self, key: Hashable) -> None:
        """Forget it."""
        self._followed.pop(key, None)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._followed

    @staticmethod
    def allow(grammar: Grammar, ends: Collection[int], tokens: Sequence[int]) -> bool:
        """Whether an answer may begin with these tokens."""
        matcher = _matcher(grammar, ends)
        return all(matcher.is_terminated() or matcher.accept_token(token) for token in tokens)

    def apply_(self, keys: Sequence[Hashable], logits: Tensor) -> None:
        """Forbid in the logits (S, V), float32, in place, what the grammars do not allow."""
        followed = {i: self._followed[key] for i, key in enumerate(keys) if key in self._followed}
        followed = {i: one for i, one in followed.items() if not one.matcher.is_terminated()}
        if not followed:
            return
        import xgrammar

        vocab_size = next(iter(followed.values())).grammar.vocab_size  # of the one tokenizer
        mask = xgrammar.allocate_token_bitmask(len(keys), vocab_size)
        for i, one in followed.items():
            one.matcher.fill_next_token_bitmask(mask, i)
            if one.grammar.lawful is not None:
                mask[i] &= one.grammar.lawful
        rows, covered = list(followed), min(vocab_size, logits.shape[-1])
        xgrammar.apply_token_bitmask_inplace(logits, mask.to(logits.device), vocab_size=covered, indices=rows)
        logits[rows, covered:] = float("-inf")  # rows of the output layer without a token

    def advance(self, keys: Sequence[Hashable], tokens: Sequence[int]) -> dict[Hashable, Exception]:
        """The tokens that were chosen, one per key; returns the keys whose grammar failed, and with what."""
        failed: dict[Hashable, Exception] = {}
        for key, token in zip(keys, tokens, strict=True):
            one = self._followed.get(key)
            if one is None:
                continue
            try:
                if not one.matcher.is_terminated():
                    accepted = one.matcher.accept_token(token)
                    assert accepted, f"token {token} was chosen against the grammar of {key}"
            except Exception as error:
                failed[key] = error
        return failed


def _matcher(grammar: Grammar, ends: Collection[int]) -> Any:
    """At the beginning of an answer."""
    import xgrammar

    return xgrammar.GrammarMatcher(grammar.compiled, override_stop_tokens=sorted(ends))
