"""Directories of page numbers that a cache would hold under a rule, in flat arrays, without contents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from itertools import chain


class LinkedLists:
    """Lists of numbers from 0, each from oldest to newest; every step costs the same.

    Args:
        n_lists: Number of lists.
    """

    def __init__(self, n_lists: int) -> None:
        self._n_lists = n_lists
        self._newer = array("i", range(n_lists))  # the ends of list `l` are at index `l`, number `n` at n + n_lists
        self._older = array("i", range(n_lists))

    def grow(self) -> None:
        """Add one more number, in no list."""
        self._newer.append(-1)
        self._older.append(-1)

    def __contains__(self, number: int) -> bool:
        """Whether a number is in a list."""
        return self._newer[number + self._n_lists] >= 0

    def append(self, which: int, number: int) -> None:
        """Add a number that is in no list after the newest of a list."""
        self._put(number + self._n_lists, which)

    def insert_before(self, other: int, number: int) -> None:
        """Insert a number that is in no list right before another one, as a little older."""
        self._put(number + self._n_lists, other + self._n_lists)

    def remove(self, number: int) -> None:
        """Remove a number from its list."""
        index = number + self._n_lists
        older, newer = self._older[index], self._newer[index]
        self._newer[older], self._older[newer] = newer, older
        self._newer[index] = self._older[index] = -1

    def oldest(self, which: int) -> int | None:
        """Return the oldest number of a list; None if it is empty."""
        index = self._newer[which]
        return None if index == which else index - self._n_lists

    def walk(self, which: int) -> Iterator[int]:
        """Yield the numbers of a list, the oldest first."""
        index = self._newer[which]
        while index != which:
            yield index - self._n_lists
            index = self._newer[index]

    def _put(self, index: int, newer: int) -> None:
        older = self._older[newer]
        self._older[index], self._newer[index] = older, newer
        self._newer[older] = self._older[newer] = index


_NONE = -1
_KEEP, _DISCARD = 0, 1


class PageDirectory(ABC):
    """Pages that a cache would hold. Followers of a page are older than it in the same list.

    Attributes:
        misses: Accesses to pages that it did not hold.
    """

    def __init__(self, n_lists: int) -> None:
        self._lists = LinkedLists(n_lists)
        self._n = self.misses = 0

    def __len__(self) -> int:
        return self._n

    def __contains__(self, number: int) -> bool:
        return number in self._lists

    def grow(self) -> None:
        """Add one more number."""
        self._lists.grow()

    @abstractmethod
    def evict(self) -> int | None:
        """Remove the next victim and return it; None if nothing is left."""

    @abstractmethod
    def in_order(self) -> Iterator[int]:
        """Yield the numbers that are held, about in the order of victims."""

    def _enter(self, number: int, parent: int) -> bool | None:
        """Record an access: a held page leaves its list, to be put back; else it is a miss.

        Returns:
            Whether it is new; None if it cannot be held, because its request is longer than the cache.
        """
        if number in self._lists:
            self._lists.remove(number)
            return False
        self.misses += 1
        if parent != _NONE and parent not in self._lists:
            return None
        self._n += 1
        return True

    def _put(self, which: int, number: int, parent: int) -> None:
        """Put a page into the list of its parent, as a little older.

        Without a parent it is appended to a list.
        """
        if parent == _NONE:
            self._lists.append(which, number)
        else:
            self._lists.insert_before(parent, number)

    def _take_out(self, number: int) -> int:
        self._lists.remove(number)
        self._n -= 1
        return number


class LRUDirectory(PageDirectory):
    """Pages that LRU would hold.

    Followers of a page are older than it, so that the oldest has no followers.
    """

    def __init__(self) -> None:
        super().__init__(1)

    def touch(self, number: int, parent: int) -> None:
        """Record an access.

        `parent` is the number before it in the request, which was touched just now, or -1.
        """
        if self._enter(number, parent) is None:
            return
        if parent != _NONE and parent not in self._lists:  # it left the directory after its follower had come
            self._n -= 1
            return
        self._put(0, number, parent)

    def evict(self) -> int | None:
        """See `PageDirectory`."""
        number = self._lists.oldest(0)
        return None if number is None else self._take_out(number)

    def in_order(self) -> Iterator[int]:
        """Yield the numbers that are held, the next victim first."""
        return self._lists.walk(0)


class BitDirectory(PageDirectory):
    """Pages that are held if those to discard are evicted first, by LRU among equals."""

    def __init__(self) -> None:
        super().__init__(2)
        self._discard = bytearray()
        self._parents = array("i")
        self._followers = array("i")

    def grow(self) -> None:
        """See `PageDirectory`."""
        super().grow()
        self._discard.append(0)
        self._parents.append(_NONE)
        self._followers.append(0)

    def touch(self, number: int, parent: int, discard: bool) -> None:
        """Record an access, with its bit; `parent` as in `LRUDirectory`."""
        new = self._enter(number, parent)
        if new is None:
            return
        if new:
            self._parents[number] = parent
            if parent != _NONE:
                self._followers[parent] += 1
        self._discard[number] = discard
        if discard and (parent == _NONE or not self._discard[parent]):
            self._lists.append(_DISCARD, number)
            return
        if not discard and parent != _NONE and self._discard[parent]:
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
        if parent != _NONE:
            self._followers[parent] -= 1
        return self._take_out(number)

    def in_order(self) -> Iterator[int]:
        """See `PageDirectory`."""
        return chain(self._lists.walk(_DISCARD), self._lists.walk(_KEEP))

    def _keep(self, number: int) -> None:
        """Keep a page and all before it, because one after it is kept."""
        path = []
        while number != _NONE and self._discard[number]:
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
    """Numbers from 0 by their keys, in a hash table with linear probing."""

    def __init__(self) -> None:
        self._keys = array("Q")  # by number
        self._slots = array("i", [_EMPTY] * 64)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def get(self, key: int) -> int | None:
        """Return the number with this key; None if there is none."""
        number = self._slots[self._slot(key)]
        return None if number == _EMPTY else number

    def add(self, key: int, number: int) -> None:
        """File a number, at most one more than the highest so far, under a new key."""
        self.note(key, number)
        self.file(number)

    def note(self, key: int, number: int) -> None:
        """Remember the key of an unfiled number, at most one more than the highest so far."""
        if number == len(self._keys):
            self._keys.append(key)
        self._keys[number] = key

    def file(self, number: int) -> None:
        """File a number under its key, in place of the number that was filed there."""
        if 3 * self._n >= 2 * len(self._slots):
            self._resize()
        slot = self._slot(self._keys[number])
        self._n += self._slots[slot] == _EMPTY
        self._slots[slot] = number

    def move(self, old: int, new: int) -> None:
        """File the key of a number under a new one, at most one more than the highest so far."""
        self.note(self._keys[old], new)
        self.file(new)

    def remove(self, number: int) -> None:
        """Remove a number from the table if it is filed; numbers that it had displaced move up."""
        if self._slots[self._slot(self._keys[number])] != number:
            return
        slots, keys, mask = self._slots, self._keys, len(self._slots) - 1
        hole = slot = self._slot(keys[number])
        while True:
            slot = slot + 1 & mask
            other = slots[slot]
            if other == _EMPTY:
                break
            if (slot - self._first(keys[other]) & mask) >= (slot - hole & mask):  # its search would end in the hole
                slots[hole], hole = other, slot
        slots[hole] = _EMPTY
        self._n -= 1

    def _first(self, key: int) -> int:
        return (key * _SPREAD & 0xFFFFFFFFFFFFFFFF) >> 32 & len(self._slots) - 1

    def _slot(self, key: int) -> int:
        """Return the slot of a key, or the one where it would be."""
        slots, keys, mask = self._slots, self._keys, len(self._slots) - 1
        slot = self._first(key)
        while (number := slots[slot]) != _EMPTY and keys[number] != key:
            slot = slot + 1 & mask
        return slot

    def _resize(self) -> None:
        numbers = [number for number in self._slots if number != _EMPTY]
        self._slots = array("i", [_EMPTY]) * (2 * len(self._slots))
        for number in numbers:
            self._slots[self._slot(self._keys[number])] = number
