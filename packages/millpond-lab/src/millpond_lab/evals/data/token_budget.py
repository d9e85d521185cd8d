"""Amount of text that fits in a number of tokens, for any tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from millpond.errors import OptionError

#: A word with the white space before it, so that joined words are the text again.
_WORD = re.compile(r"\s*\S+")


class TokenBudget:
    """Counts tokens of prompts as they will be run: the context with its start mark, then a question."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def tokens(self, text: str, start: bool = False) -> int:
        """Tokens of `text`; with `start`, of a prompt that begins with it."""
        return len(self.tokenizer(text, add_special_tokens=start, verbose=False)["input_ids"])

    def prompt(self, context: str, questions: Sequence[str]) -> int:
        """Tokens of the context and the longest question."""
        return self.tokens(context, start=True) + max(map(self.tokens, questions))

    def cut_middle(self, text: str, limit: int) -> str:
        """`text`, or its beginning and end, in whole words, with at most `limit` tokens.

        Raises:
            OptionError: not even a word at each end fits.
        """
        if self.tokens(text, start=True) <= limit:
            return text
        parts = _WORD.findall(text)

        def ends(keep: int) -> str:
            return "".join(parts[: keep - keep // 2]) + "".join(parts[len(parts) - keep // 2 :])

        keep = largest_fitting(lambda n: self.tokens(ends(n), start=True), limit, len(parts))
        if keep < 2:
            raise OptionError(f"no text is left in the {max(limit, 0)} tokens besides the question; raise max_tokens")
        return ends(keep)

    def head(self, text: str, limit: int) -> int:
        """Characters of the longest run of whole words from the beginning that has at most `limit` tokens."""
        ends = [0, *(match.end() for match in _WORD.finditer(text))]
        return ends[largest_fitting(lambda n: self.tokens(text[: ends[n]]), limit, len(ends) - 1)]


def largest_fitting(size: Callable[[int], int], limit: int, most: int | None = None) -> int:
    """The largest n up to `most` with `size(n) <= limit`, -1 if not even 0 fits; `size` must not shrink.

    Sizes are interpolated, since they grow about evenly: a handful of calls where bisection needs a dozen.

    Example:
        >>> largest_fitting(lambda n: 3 * n, 100)
        33
    """
    empty = size(0)
    if empty > limit:
        return -1
    low, low_size = 0, empty
    high, high_size = (None if most is None else most + 1), 0
    guess, turn = 64, 0
    while high is None or high - low > 1:
        guess = max(guess, low + 1) if high is None else min(max(guess, low + 1), high - 1)
        found = size(guess)
        if found <= limit:
            low, low_size = guess, found
        else:
            high, high_size = guess, found
        turn += 1
        if high is None or high_size == 0:
            guess = low + int((limit - low_size) * low / max(low_size - empty, 1) * 1.02) + 1
        elif turn % 3 == 0:
            guess = (low + high) // 2
        else:
            guess = low + (high - low) * (limit - low_size) // max(high_size - low_size, 1)
    return low
