"""Directories of what a cache would hold under one rule or another: numbers of pages only, no contents."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import chain

from millpond.cache.paging.linked_lists import LinkedLists

_NOTHING = -1
_KEEP, _DISCARD = 0, 1


class LRUDirectory:
    """What LRU would hold. Pages that follow another one are older than it, so that the oldest has no followers.

    Attributes:
        misses: accesses to what it did not hold.
    """

    def __init__(self) -> None:
        self._lists = LinkedLists(1)
        self._n = self.misses = 0

    def __len__(self) -> int:
        return self._n

    def __contains__(self, number: int) -> bool:
        return number in self._lists

    def grow(self) -> None:
        """One more number."""
        self._lists.grow()

    def touch(self, number: int, parent: int) -> None:
        """An access; parent: number before it in the request, which was touched just now, or -1."""
        if number in self._lists:
            self._lists.remove(number)
            self._n -= 1
        else:
            self.misses += 1
        if parent == _NOTHING:
            self._lists.append(0, number)
        elif parent in self._lists:
            self._lists.insert_before(parent, number)
        else:  # the request is longer than the cache
            return
        self._n += 1

    def evict(self) -> int | None:
        """Take out the next victim and return it; None if nothing is left."""
        number = self._lists.oldest(0)
        if number is not None:
            self._lists.remove(number)
            self._n -= 1
        return number

    def in_order(self) -> Iterator[int]:
        """What is held, the next victim first."""
        return self._lists.walk(0)


class BitDirectory:
    """What is held where pages whose bit says "discard" go first, and LRU decides among equals.

    Attributes:
        misses: accesses to what it did not hold.
    """

    def __init__(self) -> None:
        self._lists = LinkedLists(2)
        self._discard = bytearray()
        self._parents = array("i")
        self._followers = array("i")
        self._n = self.misses = 0

    def __len__(self) -> int:
        return self._n

    def __contains__(self, number: int) -> bool:
        return number in self._lists

    def grow(self) -> None:
        """One more number."""
        self._lists.grow()
        self._discard.append(0)
        self._parents.append(_NOTHING)
        self._followers.append(0)

    def touch(self, number: int, parent: int, discard: bool) -> None:
        """An access; parent: as of `LRUDirectory`. discard: its bit."""
        if number in self._lists:
            self._lists.remove(number)
        else:
            self.misses += 1
            if parent != _NOTHING and parent not in self._lists:  # the request is longer than the cache
                return
            self._parents[number] = parent
            if parent != _NOTHING:
                self._followers[parent] += 1
            self._n += 1
        self._discard[number] = discard
        if discard and (parent == _NOTHING or not self._discard[parent]):
            self._lists.append(_DISCARD, number)
            return
        if not discard and parent != _NOTHING and self._discard[parent]:
            self._keep(parent)
        self._put(number, parent)

    def evict(self) -> int | None:
        """Take out the next victim and return it; None if nothing is left."""
        while (number := self._lists.oldest(_DISCARD)) is not None and self._followers[number]:
            self._keep(number)
        if number is None:
            number = self._lists.oldest(_KEEP)
        if number is None:
            return None
        assert not self._followers[number], "followers are older"
        self._lists.remove(number)
        parent = self._parents[number]
        if parent != _NOTHING:
            self._followers[parent] -= 1
        self._n -= 1
        return number

    def in_order(self) -> Iterator[int]:
        """What is held, about in the order of victims."""
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
            self._put(number, self._parents[number])

    def _put(self, number: int, parent: int) -> None:
        """Put a page into the list of its parent, as a little older; without a parent into the list of those kept."""
        if parent == _NOTHING:
            self._lists.append(_KEEP, number)
        else:
            self._lists.insert_before(parent, number)
