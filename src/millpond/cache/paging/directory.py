"""Directories of what a cache would hold under one rule or another: numbers of pages only, no contents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from itertools import chain

from millpond.cache.paging.linked_lists import LinkedLists

_NOTHING = -1
_KEEP, _DISCARD = 0, 1


class PageDirectory(ABC):
    """What a cache would hold. Pages that follow another one are older than it in the same list.

    Attributes:
        misses: accesses to what it did not hold.
    """

    def __init__(self, n_lists: int) -> None:
        self._lists = LinkedLists(n_lists)
        self._n = self.misses = 0

    def __len__(self) -> int:
        return self._n

    def __contains__(self, number: int) -> bool:
        return number in self._lists

    def grow(self) -> None:
        """One more number."""
        self._lists.grow()

    @abstractmethod
    def evict(self) -> int | None:
        """Take out the next victim and return it; None if nothing is left."""

    @abstractmethod
    def in_order(self) -> Iterator[int]:
        """What is held, about in the order of victims."""

    def _enter(self, number: int, parent: int) -> bool | None:
        """An access: a page that is held leaves its list, to be put back; one that is not is a miss.

        Returns:
            Whether it is new; None: it cannot be held, because its request is longer than the cache.
        """
        if number in self._lists:
            self._lists.remove(number)
            return False
        self.misses += 1
        if parent != _NOTHING and parent not in self._lists:
            return None
        self._n += 1
        return True

    def _put(self, which: int, number: int, parent: int) -> None:
        """Put a page into the list of its parent, as a little older; without a parent to the end of a list."""
        if parent == _NOTHING:
            self._lists.append(which, number)
        else:
            self._lists.insert_before(parent, number)

    def _take_out(self, number: int) -> int:
        self._lists.remove(number)
        self._n -= 1
        return number


class LRUDirectory(PageDirectory):
    """What LRU would hold. Pages that follow another one are older than it, so that the oldest has no followers."""

    def __init__(self) -> None:
        super().__init__(1)

    def touch(self, number: int, parent: int) -> None:
        """An access; parent: number before it in the request, which was touched just now, or -1."""
        if self._enter(number, parent) is None:
            return
        if parent != _NOTHING and parent not in self._lists:  # it left the directory after its follower had come
            self._n -= 1
            return
        self._put(0, number, parent)

    def evict(self) -> int | None:
        """See `PageDirectory`."""
        number = self._lists.oldest(0)
        return None if number is None else self._take_out(number)

    def in_order(self) -> Iterator[int]:
        """What is held, the next victim first."""
        return self._lists.walk(0)


class BitDirectory(PageDirectory):
    """What is held where pages whose bit says "discard" go first, and LRU decides among equals."""

    def __init__(self) -> None:
        super().__init__(2)
        self._discard = bytearray()
        self._parents = array("i")
        self._followers = array("i")

    def grow(self) -> None:
        """See `PageDirectory`."""
        super().grow()
        self._discard.append(0)
        self._parents.append(_NOTHING)
        self._followers.append(0)

    def touch(self, number: int, parent: int, discard: bool) -> None:
        """An access; parent: as of `LRUDirectory`. discard: its bit."""
        new = self._enter(number, parent)
        if new is None:
            return
        if new:
            self._parents[number] = parent
            if parent != _NOTHING:
                self._followers[parent] += 1
        self._discard[number] = discard
        if discard and (parent == _NOTHING or not self._discard[parent]):
            self._lists.append(_DISCARD, number)
            return
        if not discard and parent != _NOTHING and self._discard[parent]:
            self._keep(parent)
        self._put(_KEEP, number, parent)

    def evict(self) -> int | None:
        """See `PageDirectory`."""
        while (number := self._lists.oldest(_DISCARD)) is not None and self._followers[number]:
            self._keep(number)
        if number is None:
            number = self._lists.oldest(_KEEP)
        if number is None:
            return None
        assert not self._followers[number], "followers are older"
        parent = self._parents[number]
        if parent != _NOTHING:
            self._followers[parent] -= 1
        return self._take_out(number)

    def in_order(self) -> Iterator[int]:
        """See `PageDirectory`."""
        return chain(self._lists.walk(_DISCARD), self._lists.walk(_KEEP))

    def _keep(self, number: int) -> None:
        """Keep a page and all before it, because one behind it is kept."""
        path = []
        while number != _NOTHING and self._discard[number]:
            path.append(number)
            number = self._parents[number]
        for number in reversed(path):
            self._lists.remove(number)
            self._discard[number] = 0
            self._put(_KEEP, number, self._parents[number])
