"""Doubly linked lists of small numbers in flat arrays: 8 bytes for each number, which is in one list at most."""

from __future__ import annotations

from array import array
from collections.abc import Iterator


class LinkedLists:
    """`n_lists` lists of numbers from 0, each from its oldest to its newest; all steps cost the same."""

    def __init__(self, n_lists: int) -> None:
        self._n_lists = n_lists
        self._newer = array("i", range(n_lists))  # the ends of list `l` are at place `l`, number `n` at n + n_lists
        self._older = array("i", range(n_lists))

    def grow(self) -> None:
        """One more number, in no list."""
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
        """The oldest number of a list; None if it is empty."""
        place = self._newer[which]
        return None if place == which else place - self._n_lists

    def walk(self, which: int) -> Iterator[int]:
        """The numbers of a list, the oldest first."""
        place = self._newer[which]
        while place != which:
            yield place - self._n_lists
            place = self._newer[place]

    def _put(self, place: int, newer: int) -> None:
        older = self._older[newer]
        self._older[place], self._newer[place] = older, newer
        self._newer[older] = self._older[newer] = place
