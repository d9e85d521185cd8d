"""Traces as requests of pages, each page with the key of its tokens and all before them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from millpond.errors import DataError, OptionError, unknown
from millpond_lab.bench.serve.requests import CHARACTERS_PER_TOKEN, MOONCAKE_BLOCK, TRACES, TokenBlocks

#: Kinds whose requests have common beginnings.
KINDS = ("mooncake", "agents")
#: Characters of a page of a text: as many as a page of Mooncake's trace has, about.
_CHARACTERS = MOONCAKE_BLOCK * CHARACTERS_PER_TOKEN


def read_paths(trace: str) -> list[tuple[int, ...]]:
    """The requests of a trace, "KIND:PATH", without those shorter than a page.

    Raises:
        OptionError: no such kind. DataError: the file cannot be read, or holds no page.
    """
    kind, colon, path = trace.partition(":")
    if not colon:
        raise OptionError(f"trace {trace!r} must read KIND:PATH, for example mooncake:conversation_trace.jsonl")
    if kind not in KINDS:
        raise unknown("kind of trace", kind, KINDS)
    asks = TRACES[kind](Path(path))
    paths = [_of_blocks(ask.prompt) if isinstance(ask.prompt, TokenBlocks) else _of_text(ask.prompt) for ask in asks]
    paths = [path for path in paths if path]
    if not paths:
        raise DataError(f"{trace}: holds no request of a page ({MOONCAKE_BLOCK} tokens, {_CHARACTERS:,} characters)")
    return paths


def _of_blocks(prompt: TokenBlocks) -> tuple[int, ...]:
    return tuple(name for name, _ in prompt.parts)


def _of_text(text: str) -> tuple[int, ...]:
    """Full pages of a text."""
    keys, chain = [], hashlib.blake2b(digest_size=8)
    for begin in range(0, len(text) - _CHARACTERS + 1, _CHARACTERS):
        chain.update(text[begin : begin + _CHARACTERS].encode("utf-8", "surrogatepass"))
        keys.append(int.from_bytes(chain.digest(), "little"))
    return tuple(keys)
