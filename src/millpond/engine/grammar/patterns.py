"""Regular expressions that clients send: bounded, and without what xgrammar would read as if it were not there."""

from __future__ import annotations

from millpond.errors import OptionError

#: Characters of one expression at most.
MOST_CHARACTERS = 2_000
#: What may follow a backslash besides signs: classes, blanks, and characters by number.
_ESCAPES = frozenset("dDwWsSnrtfvxu0")


def check_pattern(pattern: str, where: str) -> None:
    """Refuse what would not be enforced: look-around, flags, named groups, references, anchors inside.

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
            if pattern[place + 1 : place + 2] == "?" and pattern[place + 2 : place + 3] != ":":
                raise _not_enforced(where, pattern[place : place + 4])
        elif sign == ")":
            depth -= 1
        elif sign == "{" and not pattern[place + 1 : place + 2].isdecimal():
            raise _not_enforced(where, "{ without a number")
        elif sign == "^" and not (place == 0 or (depth == 0 and pattern[place - 1] == "|")):
            raise _not_enforced(where, "^ inside")
        elif sign == "$" and not (place == len(pattern) - 1 or (depth == 0 and pattern[place + 1] == "|")):
            raise _not_enforced(where, "$ inside")
        place += 1


def _not_enforced(where: str, what: str) -> OptionError:
    return OptionError(f"{where} cannot be enforced with {what!r}; write it without")
