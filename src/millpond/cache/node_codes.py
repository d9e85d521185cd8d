"""Codes of the nodes of a prefix tree: which nodes are due, which can do without their pages, and what codes hold."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from millpond.cache.pages.memory_limit import SumMemory
from millpond.cache.prefix_node import PrefixNode

#: Blocks that follow a node before it is coded: the last tokens before a text ends stay as they are.
NEWEST_BLOCKS = 2


class NodeCodes:
    """Nodes that wait to be coded, and nodes with codes.

    A node waits from its last use on. It is due after a delay, if no request holds its pages and two blocks have
    followed it.

    Args:
        memory: Counter of the bytes of codes.
        delay_s: Seconds from the last use of a block until it is due.
        keeps_pages: Whether a coded node keeps its pages until memory is needed; else they go at once.
        clock: Time in seconds.

    Attributes:
        pinned: Nodes that requests are about to hold, which keep their pages and codes.
        n_coded: Nodes with codes in memory.
        dropped: Counter of nodes whose pages went while their codes stayed.
    """

    def __init__(
        self,
        memory: SumMemory,
        delay_s: float,
        *,
        keeps_pages: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory, self.delay_s, self.keeps_pages = memory, delay_s, keeps_pages
        self._clock = clock
        self.pinned: set[PrefixNode] = set()
        self._waiting: dict[PrefixNode, float] = {}  # since when, the longest first
        self._both: dict[PrefixNode, None] = {}  # have pages and codes, the longest unused first
        self.n_coded = self.dropped = 0
        self._pressed = False

    def press(self) -> None:
        """Let nodes be due at once while some wait: memory is short."""
        self._pressed = True

    @property
    def due_s(self) -> float | None:
        """Seconds until a node may be due; None where none waits."""
        first = next(iter(self._waiting.values()), None)
        return None if first is None else max(0.0, first + self._delay_s - self._clock())

    @property
    def _delay_s(self) -> float:
        return 0.0 if self._pressed else self.delay_s

    @property
    def n_alone(self) -> int:
        """Nodes with codes and without pages."""
        return self.n_coded - len(self._both)

    @property
    def n_waiting(self) -> int:
        """Nodes that wait to be coded."""
        return len(self._waiting)

    def used(self, node: PrefixNode) -> None:
        """Record a use of a node in memory, or that blocks have followed it."""
        if not node.pages:
            return
        if node.codes is not None:
            self._both.pop(node, None)
            self._both[node] = None
        elif node.exact is not None and node.height >= NEWEST_BLOCKS:
            self._waiting.pop(node, None)
            self._waiting[node] = self._clock()

    def left(self, node: PrefixNode) -> None:
        """Forget a node that leaves the memory, with its codes."""
        self._waiting.pop(node, None)
        self._both.pop(node, None)
        self.pinned.discard(node)
        if node.codes is not None:
            self.memory.release(node.codes.nbytes)
            node.codes = None
            self.n_coded -= 1

    def due(self, most: int) -> list[PrefixNode]:
        """Return nodes to code now, at most so many, that follow one another; they wait no longer.

        Nodes that requests hold wait again.
        """
        found: list[PrefixNode] = []
        now = self._clock()
        for node, since in list(self._waiting.items()):
            if since + self._delay_s > now or len(found) == most:
                break
            if found and not (node.parent is found[-1] and node.pools == found[-1].pools):
                break
            del self._waiting[node]
            if node.most_holders > 1:
                self._waiting[node] = now
                if found:
                    break
            else:
                found.append(node)
        self._pressed &= bool(self._waiting)
        return found

    def wait_again(self, node: PrefixNode) -> None:
        """Let a node wait that could not be coded."""
        self.used(node)

    def take(self, node: PrefixNode, codes: Tensor) -> None:
        """Hold the codes of a node in memory; the caller asks for room first."""
        assert node.codes is None, "codes are made once"
        self._waiting.pop(node, None)
        self.memory.take(codes.nbytes)
        node.codes = codes
        self.n_coded += 1
        if node.pages:
            self._both[node] = None

    def got_pages(self, node: PrefixNode) -> None:
        """Record that a node with codes has pages again."""
        self._both[node] = None

    def drop_pages(self, enough: Callable[[], bool]) -> bool:
        """Release pages of nodes that have codes until there is `enough`.

        The longest unused go first.
        Pages that requests hold too stay; so do those of pinned nodes.

        Returns:
            Whether there is enough.
        """
        for node in list(self._both):
            if node in self.pinned or node.most_holders > 1:
                continue
            self.drop_pages_of(node)
            if enough():
                return True
        return False

    def drop_pages_of(self, node: PrefixNode) -> None:
        """Release the pages of a node that has codes."""
        assert node.codes is not None, "something stays"
        node.release()
        node.pages = []
        node.decoded = False
        self._both.pop(node, None)
        self.dropped += 1

    def check_integrity(self, in_memory: list[PrefixNode]) -> None:
        """Assert that the codes of exactly these nodes are counted."""
        coded = [node for node in in_memory if node.codes is not None]
        assert len(coded) == self.n_coded, "nodes with codes"
        self.memory.check_integrity(sum(node.codes.nbytes for node in coded if node.codes is not None))
        assert set(self._both) == {node for node in coded if node.pages}, "nodes with pages and codes"
        assert all(node.pages and node.codes is None for node in self._waiting), "nodes that wait have pages alone"
