"""Regular expressions from clients: bounded, and without what xgrammar would silently ignore."""

from __future__ import annotations

import re

from millpond.errors import OptionError

#: Most characters of one expression.
MAX_CHARACTERS = 2_000
#: Most repetitions of one part, requested by `{m,n}`, and of a part inside others all together.
MAX_REPEATS, MAX_TOGETHER = 10_000, 1_000_000
#: Letters that may follow a backslash: classes, blanks, and characters by number.
_ESCAPES = frozenset("dDwWsSnrtfvxu0")


def check_pattern(pattern: str, name: str) -> None:
    """Refuse an expression that would not be enforced.

    Look-around, flags, named groups, references, anchors inside, and more repetitions than `Repetitions` takes are
    refused. An expression matches as a whole, whether it is anchored or not: where it would match inside a longer text,
    it matches alone.

    Args:
        pattern: The expression.
        name: Name of the expression in an error.

    Raises:
        OptionError: it holds one of these, or is longer than `MAX_CHARACTERS`.

    Example:
        >>> check_pattern("^(?:a|b){2,5}$", "pattern")
    """
    if len(pattern) > MAX_CHARACTERS:
        raise OptionError(f"{name} has {len(pattern):,} characters and may have {MAX_CHARACTERS:,}")
    repetitions = Repetitions(name)
    depth, in_class, index = 0, False, 0
    while index < len(pattern):
        sign = pattern[index]
        if sign == "\\":
            index += 1
            following = pattern[index : index + 1]
            if following.isalnum() and following not in _ESCAPES:
                raise _not_enforced(name, f"\\{following}")
        elif in_class:
            in_class = sign != "]"
        elif sign == "[":
            in_class = True
            index += pattern[index + 1 : index + 2] == "^"
        elif sign == "(":
            depth += 1
            repetitions.begin()
            if pattern[index + 1 : index + 2] == "?" and pattern[index + 2 : index + 3] != ":":
                raise _not_enforced(name, pattern[index : index + 4])
        elif sign == ")":
            depth -= 1
            repetitions.end()
        elif sign == "{":
            if not pattern[index + 1 : index + 2].isdecimal():
                raise _not_enforced(name, "{ without a number")
            repetitions.count(pattern, index)
        elif sign == "^" and not (index == 0 or (depth == 0 and pattern[index - 1] == "|")):
            raise _not_enforced(name, "^ inside")
        elif sign == "$" and not (index == len(pattern) - 1 or (depth == 0 and pattern[index + 1] == "|")):
            raise _not_enforced(name, "$ inside")
        index += 1


class Repetitions:
    """Counts of repetitions in a text that is read from left to right, groups inside groups.

    The text is an expression or a grammar.

    Args:
        name: Name of the text in an error.
    """

    _COUNT = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}")

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[int] = [1]  # of each open group, repetitions of the part that has most
        self._last = 1  # of the group that ended last

    def begin(self) -> None:
        """Begin a group."""
        self._open.append(1)

    def end(self) -> None:
        """End a group; one that never began is left to the compiler to refuse."""
        self._last = self._open.pop() if len(self._open) > 1 else 1
        self._open[-1] = max(self._open[-1], self._last)

    def count(self, text: str, index: int) -> int:
        """Count the repetitions that begin at `index`, with a brace, and return where they end.

        Raises:
            OptionError: more than `MAX_REPEATS`, a minimum above the maximum, or too many with those around it.
        """
        match = self._COUNT.match(text, index)
        if match is None:
            return index
        bounds = [part.lstrip("0") or "0" for part in match.groups() if part]
        if any(len(bound) > len(str(MAX_REPEATS)) or int(bound) > MAX_REPEATS for bound in bounds):
            raise OptionError(f"{self._name}: {_cut(match[0])} repeats more than {MAX_REPEATS:,} times")
        min_repeats, max_repeats = int(bounds[0]), int(bounds[-1])
        if min_repeats > max_repeats:
            raise OptionError(
                f"{self._name}: {match[0]} repeats at least {min_repeats} times and at most {max_repeats}"
            )
        inner_repeats = self._last if text[max(index - 64, 0) : index].rstrip().endswith(")") else 1
        together = max(max_repeats, 1) * inner_repeats
        if together > MAX_TOGETHER:
            raise OptionError(
                f"{self._name}: {match[0]} repeats what repeats itself, {together:,} times together; at most "
                f"{MAX_TOGETHER:,} can be enforced"
            )
        self._open[-1] = max(self._open[-1], together)
        return match.end() - 1


#: Parts of a grammar that may hold braces: comments, texts and classes of characters.
_HIDDEN = re.compile(r"""#[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|\[(?:[^\]\\\n]|\\.)*\]""")


def check_grammar(grammar: str, name: str) -> None:
    """Refuse a grammar in EBNF that repeats a part more often than can be enforced.

    Args:
        grammar: The grammar.
        name: Name of the grammar in an error.

    Raises:
        OptionError: see `Repetitions.count`.

    Example:
        >>> check_grammar('root ::= ("a" | "{99999}"){1,20}', "grammar")
    """
    repetitions, index = Repetitions(name), 0
    while index < len(grammar):
        sign = grammar[index]
        if sign in "#\"'[" and (hidden := _HIDDEN.match(grammar, index)):
            index = hidden.end()
            continue
        if sign == "(":
            repetitions.begin()
        elif sign == ")":
            repetitions.end()
        elif sign == "{":
            index = repetitions.count(grammar, index)
        index += 1


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def _not_enforced(name: str, part: str) -> OptionError:
    return OptionError(f"{name} cannot be enforced with {part!r}; write it without")
