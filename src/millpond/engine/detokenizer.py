"""Incremental detokenization of one completion, token by token, never taken back, up to a stop text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from millpond.engine.sampling.params import SamplingParams
from millpond.engine.token_bytes import REPLACEMENT, TokenBytes


class StopStringMatcher:
    """Passes text on up to the first stop text, whichever way it is cut into pieces.

    The one that is complete first counts; of those complete at the same character, the longest. The cost is a step
    per character and stop text (Knuth, Morris and Pratt 1977).

    Args:
        stops: Stop texts.
        include: Pass the stop text on too.

    Attributes:
        stop_text: The stop text that was met.

    Example:
        >>> matcher = StopStringMatcher(["END"])
        >>> matcher.add("the E"), matcher.add("N"), matcher.add("D of it"), matcher.stop_text
        ('the ', '', '', 'END')
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stop_text: str | None = None
        self._include = include
        self._stops = [(stop, _borders(stop)) for stop in sorted(stops, key=len, reverse=True)]
        self._matched = [0] * len(stops)  # characters of each stop text that the text so far ends with
        self._held = ""

    def add(self, text: str, end: bool = True) -> str:
        """Return the text that can be passed on now.

        The possible beginning of a stop text is held back.

        Args:
            text: New text.
            end: Whether a stop text that is complete within this text counts.
        """
        if not self._stops:
            return text
        text = self._held + text
        for index in range(len(self._held), len(text)):
            stop = self._step(text[index])
            if stop is not None and end:
                self.stop_text, self._held = stop, ""
                return text[: index + 1] if self._include else text[: index + 1 - len(stop)]
        keep = len(text) - max(self._matched)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Return the text that was held back, as no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Return the longest stop text that this character completes."""
        complete = None
        for i, (stop, borders) in enumerate(self._stops):
            n = self._matched[i]
            while n and stop[n] != character:
                n = borders[n - 1]
            if stop[n] == character:
                n += 1
            if n == len(stop):
                complete = complete or stop
                n = borders[n - 1]
            self._matched[i] = n
        return complete


def _borders(stop: str) -> list[int]:
    """Return, for each beginning of a text, the length of its longest border.

    A border is a proper beginning that is also its end.
    """
    borders, n = [0], 0
    for character in stop[1:]:
        while n and stop[n] != character:
            n = borders[n - 1]
        if stop[n] == character:
            n += 1
        borders.append(n)
    return borders


#: Most tokens after the last whole character that may still become one, and most of the last ones that may after that.
MAX_TOKENS, MAX_MISSING = 32, 6


class TokenDecoder(Protocol):
    """Part of a tokenizer that is needed; those of transformers have it."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> Any: ...


class IncrementalDetokenizer:
    """Text of a growing list of tokens, piece by piece.

    All pieces together are the text of all tokens by `TokenBytes.text`, whatever the tokens are.

    Args:
        tokenizer: The tokenizer.
        skip_special_tokens: Leave special tokens out.
        kept: Special tokens that are not left out.
    """

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool, kept: Collection[int] = ()) -> None:
        self._bytes = TokenBytes(tokenizer)
        self._special = self._bytes.special.difference(kept) if skip_special_tokens else frozenset[int]()
        self._tokens: list[int] = []  # the last ones: those of the last whole piece, and those after them
        self._n_whole = 0  # tokens whose text is complete and was returned
        self._shown = ""  # the text of self._tokens that is out

    def add(self, token: int) -> str:
        """Return the text that this token makes certain; empty while a character is not complete."""
        if token in self._special:
            return ""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith(REPLACEMENT):
            return self._whole(text)
        return self._broken(text) if len(self._tokens) - self._n_whole > MAX_TOKENS else ""

    def finish(self) -> str:
        """Return the rest, which no further token will complete."""
        return self._whole(self._decode(self._tokens))

    def _whole(self, text: str) -> str:
        """Return the new text, which is complete; the last piece stays as context."""
        latest = self._tokens[self._n_whole :]
        alone = self._decode(latest)
        new = text[len(self._shown) :] if text.startswith(self._shown) else alone
        if alone or len(self._tokens) > MAX_TOKENS:
            self._tokens, self._shown = latest, alone
        else:  # no text, so it would not do as the beginning of the next: a space is lost there
            self._shown = text
        self._n_whole = len(self._tokens)
        return new

    def _broken(self, text: str) -> str:
        """Return the new text except for the last tokens: only those may still become a character."""
        for keep in range(MAX_MISSING, -1, -1):
            first, last = self._tokens[: len(self._tokens) - keep], self._tokens[len(self._tokens) - keep :]
            certain = self._decode(first)
            if certain + self._decode(last) == text:  # no character is cut in two
                break
        new = certain[len(self._shown) :]
        self._tokens, self._n_whole, self._shown = last, 0, ""
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._bytes.text(tokens, False)  # those that are skipped are not among them


class Writer:
    """Text of one completion up to its first stop text.

    Tokens that end an answer by their id are not added: the engine handles them.

    Args:
        tokenizer: The tokenizer.
        params: Stop texts, and special tokens that are written.
    """

    def __init__(self, tokenizer: TokenDecoder, params: SamplingParams) -> None:
        self._pieces = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, params.kept_special_tokens)
        self._stops = StopStringMatcher(params.stop, params.include_stop)
        self._parts: list[str] = []
        self._missing = params.min_tokens  # tokens to come before a stop may end the text

    def add(self, token_id: int) -> tuple[str, str | None]:
        """Return the new text, and the stop text that ended it.

        Text that may be the beginning of a stop text is held back until it is clear.
        """
        assert self._stops.stop_text is None, "the text has ended"
        is_too_early, self._missing = self._missing > 0, max(0, self._missing - 1)
        return self._put(self._stops.add(self._pieces.add(token_id), end=not is_too_early)), self._stops.stop_text

    def finish(self) -> str:
        """Return the rest of the text, once no token comes any more.

        It is the text that was held back, and bytes that are no character.
        """
        if self._stops.stop_text is not None:
            return ""
        return self._put(self._stops.add(self._pieces.finish(), end=not self._missing) + self._stops.finish())

    @property
    def stopped(self) -> str | None:
        """Stop text that ended it."""
        return self._stops.stop_text

    @property
    def text(self) -> str:
        """All text that was returned."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def _put(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text
