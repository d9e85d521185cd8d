"""Hash table from keys of 64 bits to small numbers in flat arrays: 8 bytes for each number, and 6 to 12 of places.

Places are taken by numbers that are filed alone; a key may be noted without being filed.
"""

from __future__ import annotations

from array import array

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
        """The number with this key; None if there is none."""
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
