"""Choice of the worker that gets a request, by its load and the prefixes that it is thought to hold."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from millpond.engine.chunks.prompt import Prompt
from millpond.engine.cluster_figures import Role
from millpond.engine.outputs import EngineStats
from millpond.engine.request import Request

#: Tokens of prompts that a request which decodes counts for: a step of a small model on a CPU takes about as long.
DECODING = 16


#: Share of the sum of recent work that is left after each request.
_LEFT = 1 - 1 / 64
#: A worker may have had this multiple of the mean of recent work before that counts against it.
_EVEN = 1.0


class RecentWork:
    """Tokens of prompts that each worker was given lately.

    Without it a beginning that all prompts have in common would draw them all to the worker that read it first,
    wherever it has nothing to do at the moment.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}

    def note(self, worker: str, tokens: int) -> None:
        """Record that a worker gets a prompt and reads `tokens` of it."""
        self._tokens = {name: _LEFT * number for name, number in self._tokens.items() if number > 1}
        self._tokens[worker] = self._tokens.get(worker, 0.0) + tokens

    def ahead(self, workers: Collection[str]) -> dict[str, int]:
        """Return the tokens by which each of these workers was given more than its share."""
        mean = sum(self._tokens.get(name, 0.0) for name in workers) / max(len(workers), 1)
        return {name: int(max(0.0, self._tokens.get(name, 0.0) - _EVEN * mean)) for name in workers}


@dataclass(frozen=True, slots=True)
class Load:
    """Work that a worker has to do.

    Attributes:
        worker: Its name.
        role: Its role.
        unread: Tokens of prompts that it has to read.
        running: Requests that it has, or that are on their way to it.
        stats: Statistics of its last report; None before it.
        ahead: See `RecentWork.ahead`.
    """

    worker: str
    role: Role
    unread: int
    running: int
    stats: EngineStats | None
    ahead: int = 0

    @property
    def cost(self) -> int:
        """About how much must be done before a new request is served, in tokens that are read."""
        return self.unread + DECODING * self.running + self.ahead

    @property
    def room(self) -> float:
        """Share of its limit of bytes that is free; 1 where there is no limit."""
        stats = self.stats
        return 1.0 if stats is None or not stats.kv_limit else 1 - stats.kv_bytes / stats.kv_limit


def choose(
    loads: Iterable[Load], roles: frozenset[Role], n_bytes: int = 0, spared: Mapping[str, int] | None = None
) -> str | None:
    """Return the worker that has a request done first, or the one with the most room.

    A worker that holds the beginning of a prompt is ahead by the tokens that it need not read. It is chosen until it
    has that much more to do than another one, which then reads the prompt and holds its beginning too.

    Args:
        loads: Work of each worker.
        roles: Roles of the workers to choose from.
        n_bytes: Bytes that the request takes at once; workers without room for them come last.
        spared: Tokens of the prompt that a worker holds, by its name.

    Returns:
        Its name; None if there is none.
    """

    def fits(load: Load) -> bool:
        stats = load.stats
        return stats is None or not stats.kv_limit or stats.kv_bytes + n_bytes <= stats.kv_limit

    def cost(load: Load) -> int:
        return load.cost - (spared.get(load.worker, 0) if spared else 0)

    able = [load for load in loads if load.role in roles]
    best = min(able, key=lambda load: (not fits(load), cost(load), -load.room, load.worker), default=None)
    return None if best is None else best.worker


#: Characters that count as a token where a prompt is a text.
CHARACTERS = 4
#: Most blocks of one worker that are known, whatever it holds.
MAX_BLOCKS = 2**17


class PrefixLedger:
    """Keys of blocks by worker, the least recently used first.

    A key is a keyed hash of a block, of all before it, and of the request's salt and cache options: prompts that begin
    alike have the same first keys, and the keys tell nothing about their texts.

    Args:
        block: Tokens of a block, as engines share them.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self._secret = secrets.token_bytes(32)
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def keys(self, request: Request) -> tuple[bytes, ...]:
        """Return the keys of the full blocks of a prompt; none of one with chunks."""
        prompt, cache = request.prompt, request.cache
        if isinstance(prompt, Prompt):
            return ()
        options = sorted(cache.options.items())
        kind = repr((cache.method, options, cache.budget, cache.codec, request.cache_salt, type(prompt)))
        chain = hashlib.blake2b(kind.encode(), digest_size=16, key=self._secret)
        data, step = _bytes_of(prompt, self.block)
        keys = []
        for begin in range(0, len(data) - step + 1, step):
            chain.update(data[begin : begin + step])
            keys.append(chain.digest())
        return tuple(keys)

    def hits(self, worker: str, keys: Sequence[bytes]) -> int:
        """Return the tokens at the beginning of a prompt that a worker is thought to hold."""
        blocks = self._held.get(worker)
        if not blocks:
            return 0
        number = next((n for n, key in enumerate(keys) if key not in blocks), len(keys))
        return number * self.block

    def note(self, worker: str, keys: Sequence[bytes]) -> None:
        """Record that a worker reads a prompt."""
        blocks = self._held.setdefault(worker, OrderedDict())
        for key in reversed(keys):  # the beginning is the last to be forgotten
            blocks[key] = None
            blocks.move_to_end(key)
        self.trim(worker, MAX_BLOCKS)

    def trim(self, worker: str, blocks: int) -> None:
        """Forget all but `blocks` blocks of a worker."""
        keys = self._held.get(worker)
        while keys and len(keys) > blocks:
            keys.popitem(last=False)

    def keep_workers(self, names: Iterable[str]) -> None:
        """Forget all workers but these."""
        remaining = set(names)
        self._held = {name: held for name, held in self._held.items() if name in remaining}


def _bytes_of(prompt: str | Sequence[int], block: int) -> tuple[bytes, int]:
    """Return a prompt as bytes, and the bytes of a block."""
    if isinstance(prompt, str):
        return prompt.encode("utf-32-le", "surrogatepass"), 4 * CHARACTERS * block
    return array("q", prompt).tobytes(), 8 * block
