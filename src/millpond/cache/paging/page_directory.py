"""Directories of page numbers that a cache would hold under a rule, in flat arrays, without contents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from itertools import chain


class LinkedLists:
    """`n_lists` lists of numbers from 0, each from its oldest to its newest; all steps cost the same."""

    def __init__(self, n_lists: int) -> None:
        self._n_lists = n_lists
        self._newer = array("i", range(n_lists))  # the ends of list `l` are at place `l`, number `n` at n + n_lists
        self._older = array("i", range(n_lists))

    def grow(self) -> None:
        """Return one more number, in no list."""
        self._newer.append(-1)
        self._older.append(-1)

    def __contains__(self, number: int) -> bool:
        """Whether a number is in a list."""
        return self._newer[number + self._n_lists] >= 0

    def append(self, which: int, number: int) -> None:
        """Put a number that is in no list behind the newest of one."""
        self._put(number + self._n_lists, which)

    def insert_before(self, other: int, number: int) -> None:
        """Put a number that is in no list right before another one, as a little older."""
        self._put(number + self._n_lists, other + self._n_lists)

    def remove(self, number: int) -> None:
        """Take a number out of its list."""
        place = number + self._n_lists
        older, newer = self._older[place], self._newer[place]
        self._newer[older], self._older[newer] = newer, older
        self._newer[place] = self._older[place] = -1

    def oldest(self, which: int) -> int | None:
        """Return the oldest number of a list; None if it is empty."""
        place = self._newer[which]
        return None if place == which else place - self._n_lists

    def walk(self, which: int) -> Iterator[int]:
        """Return the numbers of a list, the oldest first."""
        place = self._newer[which]
        while place != which:
            yield place - self._n_lists
            place = self._newer[place]

    def _put(self, place: int, newer: int) -> None:
        older = self._older[newer]
        self._older[place], self._newer[place] = older, newer
        self._newer[older] = self._older[newer] = place


_NOTHING = -1
_KEEP, _DISCARD = 0, 1


class PageDirectory(ABC):
    """What a cache would hold. Pages that follow another one are older than it in the same list.

    Attributes:
        misses: Accesses to what it did not hold.
    """

    def __init__(self, n_lists: int) -> None:
        self._lists = LinkedLists(n_lists)
        self._n = self.misses = 0

    def __len__(self) -> int:
        return self._n

    def __contains__(self, number: int) -> bool:
        return number in self._lists

    def grow(self) -> None:
        """Return one more number."""
        self._lists.grow()

    @abstractmethod
    def evict(self) -> int | None:
        """Take out the next victim and return it; None if nothing is left."""

    @abstractmethod
    def in_order(self) -> Iterator[int]:
        """What is held, about in the order of victims."""

    def _enter(self, number: int, parent: int) -> bool | None:
        """Return an access: a page that is held leaves its list, to be put back; one that is not is a miss.

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
        """Return an access; parent: number before it in the request, which was touched just now, or -1."""
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
        """Return an access; parent: as of `LRUDirectory`. discard: its bit."""
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


_EMPTY = -1
#: Odd number that spreads neighbouring keys: 2**64 over the golden ratio.
_SPREAD = 0x9E3779B97F4A7C15


class KeyTable:
    """Numbers from 0 by their keys. Places are tried one by one from that of the key's hash on."""

    def __init__(self) -> None:
        self._keys = array("Q")  # by number
        self._places = array("i", [_EMPTY] * 64)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def get(self, key: int) -> int | None:
        """Return the number with this key; None if there is none."""
        number = self._places[self._place(key)]
        return None if number == _EMPTY else number

    def add(self, key: int, number: int) -> None:
        """File a number, at most one more than the highest so far, under a key that is not there."""
        self.note(key, number)
        self.file(number)

    def note(self, key: int, number: int) -> None:
        """Remember the key of a number, at most one more than the highest so far, that is not filed."""
        if number == len(self._keys):
            self._keys.append(key)
        self._keys[number] = key

    def file(self, number: int) -> None:
        """File a number under the key that was noted; the number that was filed under it before is not any more."""
        if 3 * self._n >= 2 * len(self._places):
            self._resize()
        place = self._place(self._keys[number])
        self._n += self._places[place] == _EMPTY
        self._places[place] = number

    def move(self, old: int, new: int) -> None:
        """File what a number stands for under another one, at most one more than the highest so far."""
        self.note(self._keys[old], new)
        self.file(new)

    def remove(self, number: int) -> None:
        """File a number no longer, if it is; those whose place it was in the way of move up."""
        if self._places[self._place(self._keys[number])] != number:
            return
        places, keys, mask = self._places, self._keys, len(self._places) - 1
        hole = at = self._place(keys[number])
        while True:
            at = at + 1 & mask
            other = places[at]
            if other == _EMPTY:
                break
            if (at - self._first(keys[other]) & mask) >= (at - hole & mask):  # it would be found in the hole
                places[hole], hole = other, at
        places[hole] = _EMPTY
        self._n -= 1

    def _first(self, key: int) -> int:
        return (key * _SPREAD & 0xFFFFFFFFFFFFFFFF) >> 32 & len(self._places) - 1

    def _place(self, key: int) -> int:
        """Where a key lies, or would lie."""
        places, keys, mask = self._places, self._keys, len(self._places) - 1
        at = self._first(key)
        while (number := places[at]) != _EMPTY and keys[number] != key:
            at = at + 1 & mask
        return at

    def _resize(self) -> None:
        numbers = [number for number in self._places if number != _EMPTY]
        self._places = array("i", [_EMPTY]) * (2 * len(self._places))
        for number in numbers:
            self._places[self._place(self._keys[number])] = number
