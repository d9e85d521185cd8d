"""Node of a prefix tree: one block of tokens behind a certain text, and what is held of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PageIds, PagePool
from millpond.cache.pages.ref_counted_pool import Pool, RefCountedPool
from millpond.cache.state.prompt_sums import PromptSums, SumKind
from millpond.cache.tiered.block_store import StoredBlock
from millpond.codec.basis import Basis

Ids = npt.NDArray[np.int64]
#: How many pages of each pool.
Pages = dict[Pool, int]


class Behind(NamedTuple):
    """Kind of entries behind decoded ones: close to those of `kind`, and not equal."""

    kind: Hashable


class SharedPages(Protocol):
    """Pages of one layer of a prompt, of which others may hold full ones too."""

    @property
    def pool(self) -> RefCountedPool[Any]:
        """Pool of the pages."""
        ...

    def page_column(self, number: int) -> PageIds:
        """Return the pages of the `number`-th block of the prompt, head by head."""
        ...

    def share(self) -> None:
        """Note that another holder shares some of these pages from now on."""
        ...


@dataclass(frozen=True, slots=True)
class Coding:
    """Facts about the blocks of a prompt that a storage codec needs.

    Attributes:
        exact: Returns which tokens of the prompt stay exact, (layers, n) bool.
        bases: Basis of the numbers in pages of each layer; None for those of the model.
        first: Number of the first block that the prompt has read itself; others are not coded again.
    """

    exact: Callable[[], Tensor]
    bases: Sequence[Basis | None]
    first: int = 0


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One block of tokens after a certain text, and its pages per layer, one for each KV head.

    It is in memory as pages, as codes, or as both; or on the disk.

    Attributes:
        key: Kind of entries, parent and tokens, exactly.
        parent: Node of the block before it; None for the first.
        pools: Pool of each layer.
        pages: Pages of each layer; empty if there are none.
        number: Number under which the paging rule knows it; used again once the node is removed.
        hash: Hash of its tokens and all before them, 64 bits.
        n_children: Nodes in memory that follow it.
        request: Last request that used it.
        sums: Sums over the queries of all tokens up to its end, by kind, if a prompt had a breakpoint there.
        stored: Its block on the disk; None while it is in memory.
        below: Nodes on the disk that follow it.
        depth: Blocks before it.
        height: Blocks that have followed it, 2 at most.
        exact: Which of its tokens a storage codec leaves exact in each layer, (layers, slots) bool; None: unknown, and
            it is not coded.
        bases: Basis of the numbers in its pages, of each layer; empty where it is not coded.
        codes: Its bytes in the storage codec, (n,) uint8; None: there are none in memory.
        decoded: Whether its pages come from codes.
    """

    key: tuple[Hashable, ...]
    parent: PrefixNode | None
    pools: list[RefCountedPool[Any]] = field(repr=False)
    pages: list[PageIds] = field(repr=False)
    number: int
    hash: int
    n_children: int = 0
    request: int = -1
    sums: dict[SumKind, PromptSums] = field(default_factory=dict, repr=False)
    stored: StoredBlock | None = None
    below: dict[PrefixNode, None] = field(default_factory=dict, repr=False)
    depth: int = 0
    height: int = 0
    exact: Tensor | None = field(default=None, repr=False)
    bases: Sequence[Basis | None] = field(default=(), repr=False)
    codes: Tensor | None = field(default=None, repr=False)
    decoded: bool = False

    def held(self) -> Iterator[tuple[RefCountedPool[Any], PageIds]]:
        """Yield pool and pages of each layer; nothing where there are no pages."""
        if self.pages:
            yield from zip(self.pools, self.pages, strict=True)

    def retain(self) -> None:
        """Add a holder to all pages."""
        for pool, ids in self.held():
            pool.retain(ids)

    def release(self) -> None:
        """Remove a holder from all pages."""
        for pool, ids in self.held():
            pool.release(ids)

    @property
    def is_unheld(self) -> bool:
        """Whether some page has no other holder than the tree."""
        return any(bool((pool.refs(ids) == 1).any()) for pool, ids in self.held())

    def has_stored(self, kind: SumKind) -> bool:
        """Return whether sums of a kind are with it on the disk."""
        return self.stored is not None and any(form.kind == kind for form in self.stored.sums)

    @property
    def frees_memory(self) -> bool:
        """Whether its eviction frees memory: some page has no other holder, or there are sums or only codes."""
        return bool(self.sums) or not self.pages or self.is_unheld

    @property
    def most_holders(self) -> int:
        """How many hold the page that most hold, the tree among them."""
        return max((int(pool.refs(ids).max(initial=0)) for pool, ids in self.held()), default=0)


def tables_of(path: list[PrefixNode]) -> list[PageTable]:
    """Return new tables of one sequence, one per layer, that hold the pages of a path."""
    tables = []
    for layer, pool in enumerate(path[0].pools):
        assert isinstance(pool, PagePool), "tables begin with plain pages"
        columns = np.stack([node.pages[layer] for node in path], 1)
        tables.append(PageTable.of_pages(pool, columns))
    return tables


def key_of(kind: Hashable, parent: PrefixNode | None, tokens: Ids) -> tuple[Hashable, ...]:
    """Return the key of a block of tokens behind a node."""
    return kind, None if parent is None else id(parent), tokens.tobytes()
