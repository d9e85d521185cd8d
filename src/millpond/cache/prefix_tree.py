"""Prefix tree of the pages of prompts, shared by later prompts with the same beginning.

What a page of a prompt holds before anything is planned depends on the tokens up to its end alone. So these pages are
kept by a chain of blocks, one page per layer and head for each block of tokens, and a prompt that begins with known
blocks takes them over instead of reading them. They are never written: a plan writes what it keeps to pages of the
request's own, and a token behind a full block goes to a new page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PageIds, PagePool
from millpond.cache.pages.ref_counted_pool import RefCountedPool

Ids = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One block of tokens behind a certain text: which pages hold it, per layer one for each KV head."""

    key: tuple[Hashable, ...]
    parent: PrefixNode | None
    pools: list[PagePool] = field(repr=False)
    pages: list[PageIds] = field(repr=False)
    n_children: int = 0


class PrefixTree:
    """Blocks by what they hold, exactly: no hash stands for the tokens. Holds its pages until they are evicted."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[Hashable, ...], PrefixNode] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._blocks)

    def find(self, kind: Hashable, tokens: Ids, slots: int) -> list[PrefixNode]:
        """The blocks of `slots` tokens that this text begins with, as far as they are known.

        kind: of entries: blocks of different kinds are never taken for each other.
        """
        found: list[PrefixNode] = []
        for begin in range(0, len(tokens) - slots + 1, slots):
            block = self._blocks.get(_key(kind, found[-1] if found else None, tokens[begin : begin + slots]))
            if block is None:
                break
            found.append(block)
        self._use(found)
        return found

    def keep(self, kind: Hashable, tokens: Ids, tables: list[PageTable]) -> list[PrefixNode]:
        """Hold the full blocks of a prompt of one sequence, `tables` of all layers, of which nothing has left.

        The tables share these pages from now on. Returns the blocks.
        """
        slots = tables[0].pool.slots
        path = self.find(kind, tokens, slots)
        for number in range(len(path), len(tokens) // slots):
            parent = path[-1] if path else None
            pages = [table.page_column(number) for table in tables]
            key = _key(kind, parent, tokens[number * slots : (number + 1) * slots])
            block = PrefixNode(key, parent, [table.pool for table in tables], pages)
            for pool, ids in zip(block.pools, pages, strict=True):
                pool.retain(ids)
            if parent is not None:
                parent.n_children += 1
            self._blocks[key] = block
            path.append(block)
        for table in tables:
            table.share()
        self._use(path)
        return path

    def evict(self, enough: Callable[[], bool]) -> bool:
        """Release blocks, the longest unused first and none before those after it, until there is `enough`.

        Blocks whose pages are all held by requests as well stay: without them no page would be free.

        Returns:
            Whether there is enough.
        """
        if enough():
            return True
        for block in list(self._blocks.values()):  # followers of a block come before it: one round finds all
            if not block.n_children and _alone(block):
                self._drop(block)
                if enough():
                    return True
        return False

    def shorten(self, path: list[PrefixNode]) -> bool:
        """Release the last block of a path, whoever holds its pages; False where none is left or others follow it."""
        if not path or path[-1].n_children:
            return False
        self._drop(path.pop())
        return True

    def clear(self) -> None:
        """Release all."""
        for block in list(self._blocks.values()):
            self._drop(block)

    def held(self, pool: RefCountedPool[Any]) -> list[PageIds]:
        """The pages of one pool that blocks hold."""
        return [
            ids
            for block in self._blocks.values()
            for owner, ids in zip(block.pools, block.pages, strict=True)
            if owner is pool
        ]

    def _drop(self, block: PrefixNode) -> None:
        for pool, ids in zip(block.pools, block.pages, strict=True):
            pool.release(ids)
        if block.parent is not None:
            block.parent.n_children -= 1
        del self._blocks[block.key]

    def _use(self, path: list[PrefixNode]) -> None:
        """These were used now, the first blocks of the text last, so that they stay longest."""
        for block in reversed(path):
            self._blocks.move_to_end(block.key)


def _alone(block: PrefixNode) -> bool:
    """Whether some page of a block has no other holder."""
    return any(bool((pool.refs(ids) == 1).any()) for pool, ids in zip(block.pools, block.pages, strict=True))


def tables_of(path: list[PrefixNode]) -> list[PageTable]:
    """New tables of one sequence, one per layer, that hold the blocks of a path."""
    tables = []
    for layer, pool in enumerate(path[0].pools):
        columns = np.stack([block.pages[layer] for block in path], 1)
        tables.append(PageTable.of_pages(pool, columns))
    return tables


def _key(kind: Hashable, parent: PrefixNode | None, tokens: Ids) -> tuple[Hashable, ...]:
    return kind, None if parent is None else id(parent), tokens.tobytes()
