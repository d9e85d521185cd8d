"""PrefixLedger: which beginnings of prompts the workers of a cluster are thought to hold."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from millpond.engine.chunks.prompt import Prompt
from millpond.engine.request import Request

#: Characters that count as a token where a prompt is a text.
CHARACTERS = 4
#: Most blocks of one worker that are known, whatever it holds.
MOST_BLOCKS = 2**17


class PrefixLedger:
    """Keys of blocks by worker, the least recently used first.

    A key is a keyed hash of a block, of all before it, and of the request's salt and cache options: prompts that begin
    alike have the same first keys, and the keys tell nothing about their texts.

    Args:
        block: tokens of a block, as engines share them.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self._secret = secrets.token_bytes(32)
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def keys(self, request: Request) -> tuple[bytes, ...]:
        """Keys of the full blocks of a prompt; none of one with chunks."""
        prompt, cache = request.prompt, request.cache
        if isinstance(prompt, Prompt):
            return ()
        options = sorted(cache.options.items())
        kind = repr((cache.method, options, cache.budget, cache.codec, request.cache_salt, type(prompt)))
        chain = hashlib.blake2b(kind.encode(), digest_size=16, key=self._secret)
        data, step = _bytes_of(prompt, self.block)
        found = []
        for begin in range(0, len(data) - step + 1, step):
            chain.update(data[begin : begin + step])
            found.append(chain.digest())
        return tuple(found)

    def hits(self, worker: str, keys: Sequence[bytes]) -> int:
        """Tokens at the beginning of a prompt that a worker is thought to hold."""
        held = self._held.get(worker)
        if not held:
            return 0
        number = next((n for n, key in enumerate(keys) if key not in held), len(keys))
        return number * self.block

    def note(self, worker: str, keys: Sequence[bytes]) -> None:
        """A worker reads a prompt."""
        held = self._held.setdefault(worker, OrderedDict())
        for key in reversed(keys):  # the beginning is the last to be forgotten
            held[key] = None
            held.move_to_end(key)
        self.trim(worker, MOST_BLOCKS)

    def trim(self, worker: str, blocks: int) -> None:
        """A worker holds no more than `blocks` blocks."""
        held = self._held.get(worker)
        while held and len(held) > blocks:
            held.popitem(last=False)

    def keep_workers(self, names: Iterable[str]) -> None:
        """Forget all workers but these."""
        there = set(names)
        self._held = {name: held for name, held in self._held.items() if name in there}


def _bytes_of(prompt: str | Sequence[int], block: int) -> tuple[bytes, int]:
    """A prompt as bytes, and the bytes of a block."""
    if isinstance(prompt, str):
        return prompt.encode("utf-32-le", "surrogatepass"), 4 * CHARACTERS * block
    return array("q", prompt).tobytes(), 8 * block
