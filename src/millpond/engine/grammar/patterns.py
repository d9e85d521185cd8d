"""Regular expressions that clients send: bounded, and without what xgrammar would read as if it were not there."""

from __future__ import annotations

import re

from millpond.errors import OptionError

#: Characters of one expression at most.
MOST_CHARACTERS = 2_000
#: Repetitions of one part at most, as `{m,n}` asks for them, and of a part inside others all together.
MOST_REPEATS, MOST_TOGETHER = 10_000, 1_000_000
#: What may follow a backslash besides signs: classes, blanks, and characters by number.
_ESCAPES = frozenset("dDwWsSnrtfvxu0")


def check_pattern(pattern: str, where: str) -> None:
    """Refuse what would not be enforced: look-around, flags, named groups, references, anchors inside, and more
    repetitions than `Repetitions` takes.

    An expression matches as a whole, whether it is anchored or not: what it finds inside a longer text, it finds alone.

    Args:
        where: what the expression is called in an error.

    Raises:
        OptionError: it holds one of these, or is longer than `MOST_CHARACTERS`.

    Example:
        >>> check_pattern("^(?:a|b){2,5}$", "pattern")
    """
    if len(pattern) > MOST_CHARACTERS:
        raise OptionError(f"{where} has {len(pattern):,} characters and may have {MOST_CHARACTERS:,}")
    repeated = Repetitions(where)
    depth, in_class, place = 0, False, 0
    while place < len(pattern):
        sign = pattern[place]
        if sign == "\\":
            place += 1
            following = pattern[place : place + 1]
            if following.isalnum() and following not in _ESCAPES:
                raise _not_enforced(where, f"\\{following}")
        elif in_class:
            in_class = sign != "]"
        elif sign == "[":
            in_class = True
            place += pattern[place + 1 : place + 2] == "^"
        elif sign == "(":
            depth += 1
            repeated.begin()
            if pattern[place + 1 : place + 2] == "?" and pattern[place + 2 : place + 3] != ":":
                raise _not_enforced(where, pattern[place : place + 4])
        elif sign == ")":
            depth -= 1
            repeated.end()
        elif sign == "{":
            if not pattern[place + 1 : place + 2].isdecimal():
                raise _not_enforced(where, "{ without a number")
            repeated.count(pattern, place)
        elif sign == "^" and not (place == 0 or (depth == 0 and pattern[place - 1] == "|")):
            raise _not_enforced(where, "^ inside")
        elif sign == "$" and not (place == len(pattern) - 1 or (depth == 0 and pattern[place + 1] == "|")):
            raise _not_enforced(where, "$ inside")
        place += 1


class Repetitions:
    """Counts of repetitions in an expression or a grammar that is read from left to right, groups inside groups.

    Args:
        where: what the text is called in an error.
    """

    _COUNT = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}")

    def __init__(self, where: str) -> None:
        self._where = where
        self._open: list[int] = [1]  # of each open group, repetitions of the part that has most
        self._last = 1  # of the group that ended last

    def begin(self) -> None:
        """A group begins."""
        self._open.append(1)

    def end(self) -> None:
        """A group ends; one that never began is the compiler's to refuse."""
        self._last = self._open.pop() if len(self._open) > 1 else 1
        self._open[-1] = max(self._open[-1], self._last)

    def count(self, text: str, place: int) -> int:
        """Take in the count that begins at `place`, with a brace; where it ends.

        Raises:
            OptionError: it is more than `MOST_REPEATS`, less at most than at least, or too many with those around it.
        """
        found = self._COUNT.match(text, place)
        if found is None:
            return place
        numbers = [part.lstrip("0") or "0" for part in found.groups() if part]
        if any(len(number) > len(str(MOST_REPEATS)) or int(number) > MOST_REPEATS for number in numbers):
            raise OptionError(f"{self._where}: {_cut(found[0])} repeats more than {MOST_REPEATS:,} times")
        least, most = int(numbers[0]), int(numbers[-1])
        if least > most:
            raise OptionError(f"{self._where}: {found[0]} repeats at least {least} times and at most {most}")
        inside = self._last if text[max(place - 64, 0) : place].rstrip().endswith(")") else 1
        together = max(most, 1) * inside
        if together > MOST_TOGETHER:
            raise OptionError(
                f"{self._where}: {found[0]} repeats what repeats itself, {together:,} times together; at most "
                f"{MOST_TOGETHER:,} can be enforced"
            )
        self._open[-1] = max(self._open[-1], together)
        return found.end() - 1


#: What hides braces in a grammar: comments, texts and classes of characters.
_HIDDEN = re.compile(r"""#[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|\[(?:[^\]\\\n]|\\.)*\]""")


def check_grammar(grammar: str, where: str) -> None:
    """Refuse a grammar in EBNF that repeats a part more often than can be enforced.

    Args:
        where: what the grammar is called in an error.

    Raises:
        OptionError: see `Repetitions.count`.

    Example:
        >>> check_grammar('root ::= ("a" | "{99999}"){1,20}', "grammar")
    """
    repeated, place = Repetitions(where), 0
    while place < len(grammar):
        sign = grammar[place]
        if sign in "#\"'[" and (hidden := _HIDDEN.match(grammar, place)):
            place = hidden.end()
            continue
        if sign == "(":
            repeated.begin()
        elif sign == ")":
            repeated.end()
        elif sign == "{":
            place = repeated.count(grammar, place)
        place += 1


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def _not_enforced(where: str, what: str) -> OptionError:
    return OptionError(f"{where} cannot be enforced with {what!r}; write it without")
