"""Codes of the blocks of the prefix cache, made and read on threads beside the steps of an engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from millpond.cache.node_codes import NodeCodes
from millpond.cache.pages.ref_counted_pool import PageIds
from millpond.cache.prefix_node import Pages, PrefixNode
from millpond.cache.prefix_tree import PrefixTree
from millpond.cache.tiered.coded_block import BlockCodec, LayerTokens, as_computed, as_stored, read_tokens, write_tokens
from millpond.codec.basis import Basis
from millpond.codec.transform.exact_tokens import UNIT
from millpond.errors import DataError
from millpond.kernels.thread_count import torch_on_one_thread

_log = logging.getLogger(__name__)
T = TypeVar("T")

#: Bytes of pages that are copied for one round of coding, about: that is done within a step.
ROUND_BYTES = 4 << 20
#: Blocks that are decoded at a time.
DECODED_BLOCKS = 16
#: Seconds of a step for writing decoded blocks to pages, about.
WRITE_S = 0.003
#: Steps for which the blocks of a request that waits keep their pages, after it last asked.
PINNED_STEPS = 2
#: Niceness of the thread that codes blocks nobody waits for.
NICE = 10
#: Seconds that a step waits for blocks where nothing else can run.
_WAIT_S = 0.02


@dataclass(slots=True, eq=False)
class _Encoding:
    """Nodes that are being coded, the pages that they had then, and their codes."""

    nodes: list[PrefixNode]
    pages: list[list[PageIds]]
    future: Future[tuple[list[Tensor], float]]


@dataclass(slots=True, eq=False)
class _Decoding:
    """Nodes that are being decoded, the codes that they had then, and their tokens.

    Attributes:
        next: Number of the node that is written to pages next.
    """

    nodes: list[PrefixNode]
    codes: list[Tensor]
    future: Future[tuple[list[list[LayerTokens] | DataError], float]]
    next: int = 0


@dataclass(slots=True)
class CodeCounts:
    """Counters of a store of coded blocks.

    Attributes:
        encoded: Blocks that were coded.
        decoded: Blocks that were decoded.
        encode_s: CPU seconds of coding.
        decode_s: CPU seconds of decoding.
        decoded_tokens: Tokens of prompts that came from codes.
    """

    encoded: int = 0
    decoded: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    decoded_tokens: int = 0


class CodedPrefixes:
    """Coder of the nodes of a prefix tree.

    Nodes that are due are copied within a step, coded on a thread of low priority, and take their codes in a later
    step. A request that begins with nodes without pages waits while these are decoded on another thread.

    Args:
        tree: Tree with codes.
        codec: Codec of its blocks.
        room: Function that says whether there is room for pages, or will be after others are evicted.
        free: The same, without evicting anything.
    """

    def __init__(
        self, tree: PrefixTree, codec: BlockCodec, room: Callable[[Pages], bool], free: Callable[[Pages], bool]
    ) -> None:
        assert tree.codes is not None, "a tree with codes"
        self._tree, self._codes, self._codec = tree, tree.codes, codec
        self._room, self._free = room, free
        self._encoder = ThreadPoolExecutor(1, "millpond-encode", _lower_priority)
        self._decoder = ThreadPoolExecutor(1, "millpond-decode")
        self._encoding: _Encoding | None = None
        self._decoding: _Decoding | None = None
        self._steps = 0
        self._asked: dict[PrefixNode, int] = {}  # in which step a request last asked for a node
        self._heads = [heads for heads, _, _ in codec.shapes]
        self.counts = CodeCounts()

    @property
    def unit(self) -> int:
        """Tokens by whose queries a token of a block is judged: those of its block, 256 at most."""
        return min(self._codec.slots, UNIT)

    @property
    def codes(self) -> NodeCodes:
        """Codes of the tree."""
        return self._codes

    @property
    def due_s(self) -> float | None:
        """Seconds until `advance` has something to do; None: nothing, until requests come."""
        return _WAIT_S if self._encoding is not None else self._codes.due_s

    def figures(self) -> dict[str, Any]:
        """Return the fields of `PrefixStats` about codes."""
        return {
            "storage_codec": self._codec.name,
            "coded_blocks": self._codes.n_coded,
            "coded_bytes": self._codes.memory.nbytes,
            "waiting_blocks": self._codes.n_waiting,
            "live_blocks": self._tree.n_live,
            "lost": self._tree.lost,
            "live_bytes": self._tree.n_live * self._codec.live_bytes,
            **asdict(self.counts),
        }

    def advance(self) -> None:
        """Take the codes that were made, and have more blocks coded; called between two passes."""
        self._steps += 1
        for node, step in list(self._asked.items()):
            if step + PINNED_STEPS < self._steps:
                del self._asked[node]
                self._codes.pinned.discard(node)
        if self._encoding is not None and self._encoding.future.done():
            done, self._encoding = self._encoding, None
            self._take_codes(done)
        if self._encoding is None:
            self._encode_due()

    def prepare(self, path: Sequence[PrefixNode]) -> bool:
        """Return whether a request can begin with nodes.

        It can where all have pages, or there is no room for them.
        Otherwise they are being decoded; it asks again in the next step, for what the tree has then.
        """
        for node in path:
            self._asked[node] = self._steps
            self._codes.pinned.add(node)
        missing = [node for node in path if not node.pages]
        if not missing:
            return True
        if self._decoding is None:
            self._decode(_adjacent(missing, DECODED_BLOCKS))
            return False
        if not self._decoding.future.done():
            return False
        until = time.perf_counter() + WRITE_S
        while self._decoding is not None and time.perf_counter() < until:
            if not self._write_next(self._decoding):
                self._decoding = None
                return True
        return False

    def wait(self) -> None:
        """Wait for decoded blocks, for a moment: nothing else can run."""
        if self._decoding is not None:
            wait([self._decoding.future], _WAIT_S)

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._encoder, self._decoder):
            pool.shutdown(cancel_futures=True)

    # ------------------------------------------------------------------ coding

    def _encode_due(self) -> None:
        nodes = self._codes.due(max(1, ROUND_BYTES // self._codec.live_bytes))
        if not nodes:
            return
        exact = torch.cat([node.exact for node in nodes if node.exact is not None], 1)
        tokens, bases = read_tokens(nodes[0].pools, [node.pages for node in nodes]), nodes[0].bases
        first = nodes[0].depth * self._codec.slots
        future = self._encoder.submit(_timed, lambda: self._codec.encode(first, as_computed(tokens, bases), exact))
        self._encoding = _Encoding(nodes, [node.pages for node in nodes], future)

    def _take_codes(self, done: _Encoding) -> None:
        try:
            blocks, seconds = done.future.result()
        except Exception:
            _log.exception("blocks of prompts could not be coded, and stay as they are")
            return
        self.counts.encode_s += seconds
        for node, pages, codes in zip(done.nodes, done.pages, blocks, strict=True):
            if node.pages is not pages or node.codes is not None or not self._tree.holds(node):
                continue  # it left meanwhile
            need: Pages = {self._codes.memory: codes.nbytes}
            if self._free(need):
                self._codes.take(node, codes)
            elif node.most_holders > 1 or node in self._codes.pinned:
                self._codes.used(node)
                continue
            else:  # its pages make room
                node.release()
                node.pages = []
                if not self._free(need):
                    self._tree.drop_from(node)
                    continue
                self._codes.take(node, codes)
            self.counts.encoded += 1
            if node.pages and not self._codes.keeps_pages and node.most_holders <= 1 and node not in self._asked:
                self._codes.drop_pages_of(node)

    # ------------------------------------------------------------------ decoding

    def _decode(self, nodes: list[PrefixNode]) -> None:
        given = [node.codes for node in nodes if node.codes is not None]
        first = nodes[0].depth * self._codec.slots
        future = self._decoder.submit(_timed, lambda: _decoded(self._codec, first, given, nodes[0].bases))
        self._decoding = _Decoding(nodes, given, future)

    def _write_next(self, done: _Decoding) -> bool:
        """Write the next decoded block to pages; return False where there is no room."""
        if not done.next:
            self.counts.decode_s += done.future.result()[1]
        node, tokens = done.nodes[done.next], done.future.result()[0][done.next]
        codes = done.codes[done.next]
        done.next += 1
        if done.next == len(done.nodes):
            self._decoding = None
        if node.pages or node.codes is not codes:
            return True  # it has pages again, or is gone
        if isinstance(tokens, DataError):
            _log.warning("a block of a prompt is read again: %s", tokens)
            self._tree.drop_from(node)
            self._tree.lost += 1
            return True
        if not self._tree.revive(node, self._heads, self._room):
            return False
        write_tokens(node.pools, node.pages, tokens, node.depth * self._codec.slots)
        self.counts.decoded += 1
        return True


def _timed(work: Callable[[], list[T]]) -> tuple[list[T], float]:
    """Return the result of some work, and its CPU seconds."""
    began = time.thread_time()
    with torch_on_one_thread(), torch.no_grad():
        found = work()
    return found, time.thread_time() - began


def _decoded(
    codec: BlockCodec, first: int, blocks: Sequence[Tensor], bases: Sequence[Basis | None]
) -> list[list[LayerTokens] | DataError]:
    """Return the tokens of each block, of all layers, as pages hold them, or why it has none."""
    try:
        return [*codec.split(as_stored(codec.decode(first, blocks), bases))]
    except DataError as error:
        if len(blocks) == 1:
            return [error]
    alone = [_decoded(codec, first + n * codec.slots, [block], bases) for n, block in enumerate(blocks)]
    return [found for (found,) in alone]


def _adjacent(nodes: Sequence[PrefixNode], most: int) -> list[PrefixNode]:
    """Return the first nodes that follow one another."""
    n = 1
    while n < min(len(nodes), most) and nodes[n].parent is nodes[n - 1]:
        n += 1
    return list(nodes[:n])


def _lower_priority() -> None:
    """Let other threads run first, where the system has priorities of threads."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
