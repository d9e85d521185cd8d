"""One request of a load, before it is sent."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from millpond.errors import DataError, OptionError


@dataclass(frozen=True, slots=True)
class TokenBlocks:
    """A prompt of made-up tokens, block by block: equal names are equal tokens, so prompts share what traces share.

    Attributes:
        parts: (name, tokens) of each block, in order; no name below 0.
    """

    parts: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """In tokens."""
        return sum(size for _, size in self.parts)

    def tokens(self, vocab_size: int, seed: int) -> list[int]:
        """The token ids, evenly drawn from 0 to vocab_size - 1; the same for the same names and seed.

        Example:
            >>> a, b = TokenBlocks(((1, 4), (2, 3))).tokens(100, 0), TokenBlocks(((1, 4), (3, 3))).tokens(100, 0)
            >>> len(a), a[:4] == b[:4], a[4:] == b[4:]
            (7, True, False)
        """
        drawn = [np.random.default_rng((seed, name)).integers(vocab_size, size=size) for name, size in self.parts]
        tokens: list[int] = np.concatenate(drawn).tolist()
        return tokens

    def shrunk(self, times: int) -> TokenBlocks:
        """The blocks `times` times shorter, with the same names, so that they stay shared."""
        return TokenBlocks(tuple((name, -(-size // times)) for name, size in self.parts))


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request.

    Attributes:
        at_s: when the trace sent it, in seconds after its first request.
        prompt: a text, or made-up tokens. output_tokens: how many the answer has.
        session: requests of one session follow each other; None: it has no session.
    """

    at_s: float
    prompt: str | TokenBlocks
    output_tokens: int
    session: str | None = None

    def shrunk(self, times: int) -> LoadRequest:
        """The request with prompt and answer `times` times shorter; a text stays as it is."""
        prompt = self.prompt if isinstance(self.prompt, str) else self.prompt.shrunk(times)
        return replace(self, prompt=prompt, output_tokens=-(-self.output_tokens // times))


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths from `low` to `high`, each as likely.

    Example:
        >>> Span.parse("64"), Span.parse("64-256")
        (Span(low=64, high=64), Span(low=64, high=256))
    """

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Span:
        """From "64" or "64-256".

        Raises:
            OptionError: not of this form, below 1, or the wrong way round.
        """
        low, _, high = text.strip().partition("-")
        if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
            raise OptionError(f"length {text!r} must read as 64 or 64-256, in tokens, at least 1")
        return cls(int(low), int(high or low))


def synthetic(n: int, prompt: Span, output: Span, shared: int = 0, seed: int = 0) -> list[LoadRequest]:
    """`n` requests without sessions, all at 0 s; the first `shared` tokens of every prompt are the same.

    Raises:
        OptionError: the shared tokens leave no room for another token in the shortest prompt.
    """
    if not 0 <= shared < prompt.low:
        raise OptionError(
            f"{shared} shared tokens leave no other token in a prompt of {prompt.low}; share fewer, or give longer ones"
        )
    drawn = random.Random(seed)
    asks = []
    for name in range(1, n + 1):
        length = drawn.randint(prompt.low, prompt.high)
        parts = ((0, shared), (name, length - shared)) if shared else ((name, length),)
        asks.append(LoadRequest(0.0, TokenBlocks(parts), drawn.randint(output.low, output.high)))
    return asks


T = TypeVar("T")

#: Tokens per hash in Mooncake's trace (FAST'25).
MOONCAKE_BLOCK = 512
#: Characters that make about a token of English text: agent traces give answers as text.
CHARACTERS_PER_TOKEN = 4


def azure(path: Path) -> list[LoadRequest]:
    """The Azure LLM inference trace of 2023: times and lengths; every prompt is its own.

    Raises:
        DataError: the file cannot be read, or is no such trace.
    """

    def read(numbered: tuple[int, dict[str, str]]) -> LoadRequest:
        name, row = numbered
        length = _length(row["ContextTokens"])
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()  # seven digits of a second; Python reads six
        return LoadRequest(at, TokenBlocks(((name, length),)), _length(row["GeneratedTokens"]))

    with _open(path) as file:
        rows = csv.DictReader(_decoded(path, file))
        if not {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(rows.fieldnames or ()):
            raise DataError(f"{path}: the first line must read TIMESTAMP,ContextTokens,GeneratedTokens")
        return _some(path, _in_order((_in_line(path, n, read, (n, row)) for n, row in enumerate(rows, start=2))))


def mooncake(path: Path) -> list[LoadRequest]:
    """A Mooncake trace: times in ms, lengths, and the hashes of each prompt's blocks of 512 tokens.

    Raises:
        DataError: the file cannot be read, or is no such trace.
    """

    def read(row: Any) -> LoadRequest:
        names, length = tuple(int(name) for name in row["hash_ids"]), _length(row["input_length"])
        if not (len(names) - 1) * MOONCAKE_BLOCK < length <= len(names) * MOONCAKE_BLOCK:
            raise ValueError(f"{len(names)} hash_ids do not cover {length} tokens in blocks of {MOONCAKE_BLOCK}")
        if min(names) < 0:
            raise ValueError(f"hash_ids holds {min(names)}; they must not be negative")
        sizes = [MOONCAKE_BLOCK] * (len(names) - 1) + [length - (len(names) - 1) * MOONCAKE_BLOCK]
        parts = tuple(zip(names, sizes, strict=True))
        return LoadRequest(_finite(row["timestamp"]) / 1000, TokenBlocks(parts), _length(row["output_length"]))

    return _some(path, _in_order(_json_lines(path, read)))


def agents(path: Path) -> list[LoadRequest]:
    """A folder of LMCache agent traces, or one file of it: real text, each session's prompts growing.

    The first request of every file gets the same time, as if all agents began at once. Lines without a prompt and
    empty files, which these traces have, are left out.

    Raises:
        DataError: no such folder, a folder without `.jsonl` files, or a file that is no such trace.
    """

    def read(row: Any) -> LoadRequest:
        n = -(-len(row["output"]) // CHARACTERS_PER_TOKEN)
        return LoadRequest(_finite(row["timestamp"]) / 1e6, str(row["input"]), max(1, n), str(row["session_id"]))

    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no .jsonl files in this folder")
    asks = [ask for file in files for ask in _in_order(_json_lines(file, read)) if ask.prompt]
    return _some(path, sorted(asks, key=lambda ask: ask.at_s))


#: Readers by the name of what they read.
TRACES: dict[str, Callable[[Path], list[LoadRequest]]] = {"azure": azure, "mooncake": mooncake, "agents": agents}


def _open(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _json_lines(path: Path, read: Callable[[Any], LoadRequest]) -> Iterator[LoadRequest]:
    with _open(path) as file:
        for number, line in enumerate(_decoded(path, file), start=1):
            if line.strip():
                yield _in_line(path, number, lambda text: read(json.loads(text)), line)


def _decoded(path: Path, file: Iterable[str]) -> Iterator[str]:
    try:
        for line in file:
            if "\0" in line:
                raise DataError(f"{path}: not a text: it holds zero bytes")
            yield line
    except UnicodeDecodeError:
        raise DataError(f"{path}: not a text in UTF-8") from None


def _in_line(path: Path, number: int, read: Callable[[T], LoadRequest], row: T) -> LoadRequest:
    try:
        return read(row)
    except KeyError as error:
        raise DataError(f"{path}, line {number}: there is no field {error}") from None
    except (ValueError, TypeError) as error:  # json.JSONDecodeError among them
        raise DataError(f"{path}, line {number}: {error}") from None


def _length(value: Any) -> int:
    length = int(value)
    if length < 1:
        raise ValueError(f"a length of {length} tokens")
    return length


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"a time of {value}")
    return float(value)


def _in_order(asks: Iterable[LoadRequest]) -> list[LoadRequest]:
    """By time, the first one at 0."""
    found = sorted(asks, key=lambda ask: ask.at_s)
    return [LoadRequest(ask.at_s - found[0].at_s, ask.prompt, ask.output_tokens, ask.session) for ask in found]


def _some(path: Path, asks: list[LoadRequest]) -> list[LoadRequest]:
    if not asks:
        raise DataError(f"{path}: holds no requests")
    return asks
