"""Codes of the blocks of the prefix cache, made and read on threads beside the steps of an engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
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
from millpond.cache.tiered.block_store import Pools
from millpond.cache.tiered.block_tokens import (
    PoolContent,
    as_computed,
    as_pages,
    as_stored,
    as_tokens,
    copy_blocks,
    write_block,
)
from millpond.cache.tiered.coded_block import BlockCodec
from millpond.codec.basis import Basis
from millpond.errors import DataError
from millpond.kernels.thread_count import alone

_log = logging.getLogger(__name__)
T = TypeVar("T")

#: Blocks that are coded, or decoded, in one round.
ROUND_BLOCKS = 16
#: Bytes of pages that wait to be coded, and of decoded ones that wait to be written, outside of the pools.
OUTSIDE_BYTES = 64 << 20
#: Share of a step's time for copying blocks to be coded, and for writing decoded ones; and its least seconds.
STEP_SHARE, LEAST_S = 0.03, 0.001
#: Seconds for copying where no step waits.
IDLE_S = 0.005
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
    future: Future[tuple[list[list[PoolContent] | DataError], float]]
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
        self._encoding: deque[_Encoding] = deque()
        self._decoding: deque[_Decoding] = deque()
        self._step_s = 0.0
        self._copy_s = LEAST_S  # of a block
        self._steps = 0
        self._asked: dict[PrefixNode, int] = {}  # in which step a request last asked for a node
        self._heads = [heads for heads, _, _ in codec.shapes]
        self.counts = CodeCounts()

    @property
    def codes(self) -> NodeCodes:
        """Codes of the tree."""
        return self._codes

    @property
    def due_s(self) -> float | None:
        """Seconds until `advance` has something to do; None: nothing, until requests come."""
        return _WAIT_S if self._encoding else self._codes.due_s

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

    def advance(self, step_s: float | None = None) -> None:
        """Take the codes that were made, and have more blocks coded; called between two passes.

        Args:
            step_s: Seconds that the last step took; None: no request is in flight.
        """
        self._steps += 1
        self._step_s = step_s or 0.0
        for node, step in list(self._asked.items()):
            if step + PINNED_STEPS < self._steps:
                del self._asked[node]
                self._codes.pinned.discard(node)
        while self._encoding and self._encoding[0].future.done():
            self._take_codes(self._encoding.popleft())
        until = time.perf_counter() + (IDLE_S if step_s is None else max(LEAST_S, STEP_SHARE * step_s))
        while (left := until - time.perf_counter()) > 0 and self._encode_due(max(1, int(left / self._copy_s))):
            pass

    def prepare(self, path: Sequence[PrefixNode]) -> bool:
        """Return whether a request can begin with nodes.

        It can where all have pages, or there is no room for them.
        Otherwise they are being decoded; it asks again in the next step, for what the tree has then.
        """
        for node in path:
            self._asked[node] = self._steps
            self._codes.pinned.add(node)
        until = time.perf_counter() + max(LEAST_S, STEP_SHARE * self._step_s)
        while self._decoding and self._decoding[0].future.done() and time.perf_counter() < until:
            if not self._write_next(self._decoding[0]):
                self._decoding.clear()
                return True
        missing = [node for node in path if not node.pages]
        if not missing:
            return True
        if any(node.codes is None for node in missing):
            return False  # one was damaged: the path is another now
        waiting = {node for round_ in self._decoding for node in round_.nodes}
        left = OUTSIDE_BYTES // self._codec.live_bytes - len(waiting)
        while (more := [node for node in missing if node not in waiting]) and (left > 0 or not waiting):
            nodes = _adjacent(more, max(1, min(ROUND_BLOCKS, left)))
            self._decode(nodes)
            waiting.update(nodes)
            left -= len(nodes)
        return False

    def wait(self) -> None:
        """Wait for decoded blocks, for a moment: nothing else can run."""
        if self._decoding:
            wait([self._decoding[0].future], _WAIT_S)

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._encoder, self._decoder):
            pool.shutdown(cancel_futures=True)

    # ------------------------------------------------------------------ coding

    def _encode_due(self, most: int) -> bool:
        """Copy blocks that are due, and have them coded.

        Args:
            most: Most blocks.

        Returns:
            False: none is due, or enough wait.
        """
        left = OUTSIDE_BYTES // self._codec.live_bytes - sum(len(one.nodes) for one in self._encoding)
        if left <= 0 and self._encoding:
            return False
        nodes = self._codes.due(max(1, min(most, left, ROUND_BLOCKS)))
        if not nodes:
            return False
        began = time.perf_counter()
        copies = copy_blocks(nodes[0].pools, [node.pages for node in nodes])
        self._copy_s += ((time.perf_counter() - began) / len(nodes) - self._copy_s) / 4
        exact = [node.exact for node in nodes if node.exact is not None]
        first, bases = nodes[0].depth * self._codec.slots, nodes[0].bases

        def encode() -> list[Tensor]:
            return self._codec.encode(first, as_computed(as_tokens(copies), bases), torch.cat(exact, 1))

        future = self._encoder.submit(_timed, encode)
        self._encoding.append(_Encoding(nodes, [node.pages for node in nodes], future))
        return True

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
        first, pools, bases = nodes[0].depth * self._codec.slots, nodes[0].pools, nodes[0].bases
        future = self._decoder.submit(_timed, lambda: _decoded(self._codec, first, given, pools, bases))
        self._decoding.append(_Decoding(nodes, given, future))

    def _write_next(self, done: _Decoding) -> bool:
        """Write the next decoded block to pages; return False where there is no room."""
        try:
            contents, seconds = done.future.result()
        except Exception:
            self._decoding.popleft()
            raise
        self.counts.decode_s += 0.0 if done.next else seconds
        node, content = done.nodes[done.next], contents[done.next]
        codes = done.codes[done.next]
        done.next += 1
        if done.next == len(done.nodes):
            self._decoding.popleft()
        if node.pages or node.codes is not codes:
            return True  # it has pages again, or is gone
        if isinstance(content, DataError):
            _log.warning("a block of a prompt is read again: %s", content)
            self._tree.drop_from(node)
            self._tree.lost += 1
            return True
        if not self._tree.revive(node, self._heads, self._room):
            return False
        write_block(node.pools, node.pages, content)
        self.counts.decoded += 1
        return True


def _timed(work: Callable[[], list[T]]) -> tuple[list[T], float]:
    """Return the result of some work, and its CPU seconds."""
    began = time.thread_time()
    found = alone(work)
    return found, time.thread_time() - began


def _decoded(
    codec: BlockCodec, first: int, blocks: Sequence[Tensor], pools: Pools, bases: Sequence[Basis | None]
) -> list[list[PoolContent] | DataError]:
    """Return the content of the pages of each block, or why it has none."""
    try:
        return [*as_pages(pools, as_stored(codec.decode(first, blocks), bases), codec.slots, first)]
    except DataError as error:
        if len(blocks) == 1:
            return [error]
    alone = [_decoded(codec, first + n * codec.slots, [block], pools, bases) for n, block in enumerate(blocks)]
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
