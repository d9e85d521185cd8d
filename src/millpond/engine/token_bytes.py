"""Bytes of tokens, and the text of tokens whose characters are spread over several."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

#: Replacement of bytes that are no character, or none yet.
REPLACEMENT = "\ufffd"
_EACH = "millpond-each-byte"


@dataclass(frozen=True)
class _Vocabulary:
    """Properties of a tokenizer that do not change; it does not keep the tokenizer.

    Attributes:
        single: By token, the byte that it stands for.
        added: Texts of tokens that no merges make.
        special: Tokens that `skip_special_tokens` leaves out.
        letters: Bytes by the letters of a byte-level vocabulary.
    """

    single: Mapping[int, int]
    added: Mapping[int, str]
    special: frozenset[int]
    letters: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Any) -> _Vocabulary:
        kinds = {*_decoders(tokenizer)}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        flagged = frozenset(token for token, added_token in added.items() if added_token.special)
        uses_flags_alone = getattr(tokenizer, "is_fast", False)
        return cls(
            _single(tokenizer) if "ByteFallback" in kinds else {},
            {token: str(added_token) for token, added_token in added.items()},
            flagged if uses_flags_alone else flagged | frozenset(tokenizer.all_special_ids),
            _byte_letters() if "ByteLevel" in kinds else {},
        )


_VOCABULARIES: WeakKeyDictionary[Any, _Vocabulary] = WeakKeyDictionary()


class TokenBytes:
    """Bytes of a tokenizer's tokens.

    Two kinds of tokenizers have tokens that are no whole characters: those whose tokens are strings of bytes
    (byte-level), and those that have a token for each byte of characters that have no token of their own (byte
    fallback). Others have texts, whose bytes are those of UTF-8.

    Args:
        tokenizer: The tokenizer.

    Attributes:
        special: Tokens that `skip_special_tokens` leaves out.
    """

    def __init__(self, tokenizer: Any) -> None:
        vocabulary = _VOCABULARIES.get(tokenizer)
        if vocabulary is None:
            vocabulary = _VOCABULARIES[tokenizer] = _Vocabulary.of(tokenizer)
        self._tokenizer, self._vocabulary, self.special = tokenizer, vocabulary, vocabulary.special
        by_byte = {byte: token for token, byte in vocabulary.single.items()}
        self._letter, self._blank = by_byte.get(ord("A")), by_byte.get(ord(" "))

    def of(self, token: int) -> bytes:
        """Return the bytes of a token: a part of a character where it is one."""
        if token in self._vocabulary.single:
            return bytes([self._vocabulary.single[token]])
        if token in self._vocabulary.added:
            return self._vocabulary.added[token].encode()
        if self._vocabulary.letters:
            letters = self._tokenizer.convert_ids_to_tokens(token) or ""  # ids that models have for no token
            if all(letter in self._vocabulary.letters for letter in letters):
                return bytes(self._vocabulary.letters[letter] for letter in letters)
        if self._letter is not None:
            return self._continued_text([token]).encode()
        return str(self._tokenizer.decode([token])).encode()

    def text(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of some tokens, without the clean-up of spaces.

        With a tokenizer that has a token for each byte, bytes that are no UTF-8 become a replacement character each, as
        SentencePiece writes them, and characters next to them stay; transformers replaces all bytes there up to the
        next token that is no byte.
        """
        ids = list(tokens)
        text = self._plain(ids, skip_special_tokens)
        if REPLACEMENT not in text or not any(token in self._vocabulary.single for token in ids):
            return text
        if skip_special_tokens:
            ids = [token for token in ids if token not in self.special]
        parts: list[str] = []
        for single, group in groupby(ids, key=self._vocabulary.single.__contains__):
            run = list(group)
            if single:
                parts.append(bytes(self._vocabulary.single[token] for token in run).decode("utf-8", _EACH))
            else:
                parts.append(self._continued_text(run) if parts else self._plain(run))
        if ids[0] == self._blank and not self._plain(ids[:1]):  # it drops the blank that begins a text
            parts[0] = parts[0][1:]
        return "".join(parts)

    def _continued_text(self, tokens: list[int]) -> str:
        """Return the text of tokens that do not begin a text: a blank at its beginning stays."""
        return self._plain([self._letter, *tokens])[1:]

    def _plain(self, tokens: Sequence[int | None], skip: bool = False) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def _decoders(tokenizer: Any) -> Iterator[str]:
    """Yield the kinds of the steps by which a tokenizer decodes.

    There are none for a tokenizer that is not of the package tokenizers.
    """
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    steps = [json.loads(decoder.__getstate__())] if decoder is not None else []
    while steps:
        step = steps.pop()
        yield step["type"]
        steps += step.get("decoders", [])


def _byte_letters() -> dict[str, int]:
    """Return each byte by its letter in byte-level vocabularies.

    The letter is the byte itself where Latin-1 can be printed.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


def _single(tokenizer: Any) -> dict[int, int]:
    """Return the tokens of bytes; none where some byte has none."""
    vocabulary = tokenizer.get_vocab()
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    return {vocabulary[name]: byte for byte, name in enumerate(names)} if all(n in vocabulary for n in names) else {}


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH, _replace_each)
