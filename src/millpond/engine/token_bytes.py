"""Bytes that tokens stand for, and the text of tokens whose characters are spread over several."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

#: What stands for bytes that are no character, or none yet.
REPLACEMENT = "\ufffd"
_EACH = "millpond-each-byte"


@dataclass(frozen=True)
class _Vocabulary:
    """What does not change of a tokenizer; it does not keep the tokenizer.

    Attributes:
        single: by its token, each byte that has one of its own. added: texts of tokens that no merges make. special:
            those that `skip_special_tokens` leaves out. letters: bytes by the letters of a byte-level vocabulary.
    """

    single: Mapping[int, int]
    added: Mapping[int, str]
    special: frozenset[int]
    letters: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Any) -> _Vocabulary:
        kinds = {*_decoders(tokenizer)}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        flagged = frozenset(token for token, about in added.items() if about.special)
        of_itself = getattr(tokenizer, "is_fast", False)  # it goes by these flags alone
        return cls(
            _single(tokenizer) if "ByteFallback" in kinds else {},
            {token: str(about) for token, about in added.items()},
            flagged if of_itself else flagged | frozenset(tokenizer.all_special_ids),
            _byte_letters() if "ByteLevel" in kinds else {},
        )


_KNOWN: WeakKeyDictionary[Any, _Vocabulary] = WeakKeyDictionary()


class TokenBytes:
    """Bytes of a tokenizer's tokens.

    Two kinds of tokenizers have tokens that are no whole characters: those whose tokens are strings of bytes
    (byte-level), and those that have a token of each byte for the characters of which they have none (byte fallback).
    Others have texts, whose bytes are those of UTF-8.

    Attributes:
        special: tokens that `skip_special_tokens` leaves out.
    """

    def __init__(self, tokenizer: Any) -> None:
        known = _KNOWN.get(tokenizer)
        if known is None:
            known = _KNOWN[tokenizer] = _Vocabulary.of(tokenizer)
        self._tokenizer, self._known, self.special = tokenizer, known, known.special
        by_byte = {byte: token for token, byte in known.single.items()}
        self._letter, self._blank = by_byte.get(ord("A")), by_byte.get(ord(" "))

    def of(self, token: int) -> bytes:
        """Its own bytes: a part of a character where it is one."""
        if token in self._known.single:
            return bytes([self._known.single[token]])
        if token in self._known.added:
            return self._known.added[token].encode()
        if self._known.letters:
            letters = self._tokenizer.convert_ids_to_tokens(token) or ""  # ids that models have for no token
            if all(letter in self._known.letters for letter in letters):
                return bytes(self._known.letters[letter] for letter in letters)
        if self._letter is not None:
            return self._behind([token]).encode()
        return str(self._tokenizer.decode([token])).encode()

    def text(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of some tokens, without the clean-up of spaces.

        Of a tokenizer with a token of each byte, bytes that are no UTF-8 become a replacement character each, as
        SentencePiece writes them, and characters next to them stay; transformers replaces all bytes there up to the
        next token that is no byte.
        """
        ids = list(tokens)
        text = self._plain(ids, skip_special_tokens)
        if REPLACEMENT not in text or not any(token in self._known.single for token in ids):
            return text
        if skip_special_tokens:
            ids = [token for token in ids if token not in self.special]
        parts: list[str] = []
        for single, group in groupby(ids, key=self._known.single.__contains__):
            run = list(group)
            if single:
                parts.append(bytes(self._known.single[token] for token in run).decode("utf-8", _EACH))
            else:
                parts.append(self._behind(run) if parts else self._plain(run))
        if ids[0] == self._blank and not self._plain(ids[:1]):  # it drops the blank that begins a text
            parts[0] = parts[0][1:]
        return "".join(parts)

    def _behind(self, tokens: list[int]) -> str:
        """The text of tokens that do not begin a text: a blank at its beginning stays."""
        return self._plain([self._letter, *tokens])[1:]

    def _plain(self, tokens: Sequence[int | None], skip: bool = False) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def _decoders(tokenizer: Any) -> Iterator[str]:
    """Kinds of the steps by which a tokenizer decodes; none of one that is not of the package tokenizers."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    steps = [json.loads(decoder.__getstate__())] if decoder is not None else []
    while steps:
        step = steps.pop()
        yield step["type"]
        steps += step.get("decoders", [])


def _byte_letters() -> dict[str, int]:
    """Each byte, by the letter that stands for it in byte-level vocabularies: itself where Latin-1 can be printed."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _single(tokenizer: Any) -> dict[int, int]:
    """The tokens of bytes; none where some byte has none."""
    vocabulary = tokenizer.get_vocab()
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    return {vocabulary[name]: byte for byte, name in enumerate(names)} if all(n in vocabulary for n in names) else {}


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH, _replace_each)
