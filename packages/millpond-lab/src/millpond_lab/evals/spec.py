"""Names with options on a command line, "h2o:recent=0.1:sinks=0", in lists separated by commas.

A value may stand in quotes, `text:path="a, b.txt"` or `text:path='a, b.txt'`; commas and colons in it are then its own,
and a quote of the same kind is written twice. Quotes count only right behind `option=`, so that a path such as
`it's.txt` needs none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from millpond.errors import OptionError
from millpond.registry import Registry

T = TypeVar("T")

#: A colon begins an option only before `name=`, so that a value may hold one (a path on another drive).
_OPTION = re.compile(r":([A-Za-z_]\w*)=")
#: A value in quotes, which ends where the next option or the next part of a list begins.
_QUOTED = re.compile(r"""(["'])((?:(?!\1).|\1\1)*)\1(?=\s*(?:,|$)|:[A-Za-z_]\w*=)""", re.DOTALL)
#: What reads like the rest of a path that a comma has cut, and not like a name.
_REST_OF_PATH = re.compile(r"[/\\\s]|\.(txt|jsonl?|gz|csv|tsv|parquet|safetensors)$")


@dataclass(frozen=True)
class Spec:
    """A name with options as text; what the text means is the registry's to decide.

    Example:
        >>> Spec.parse("h2o:recent=0.1:sinks=0").options
        {'recent': '0.1', 'sinks': '0'}
        >>> str(Spec.parse("h2o:sinks=0"))
        'h2o:sinks=0'
        >>> Spec.parse("text:path='sea, and shore.txt':stride=64").options
        {'path': 'sea, and shore.txt', 'stride': '64'}
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Spec:
        """A spec from `name[:option=value...]`.

        Raises:
            OptionError: no name, something that is no option after it, a quote that is not closed, or an option given
                twice.
        """
        text = text.strip()
        found = _OPTION.search(text)
        name = text[: found.start()] if found else text
        if not name or ":" in name or "=" in name:
            raise OptionError(f"{text!r} must read name or name:option=value, for example h2o:recent=0.25")
        options: dict[str, str] = {}
        while found:
            option, (value, end) = found[1], _value(text, found.end())
            if option in options:
                raise OptionError(f"{text!r}: option {option!r} is given twice")
            options[option] = value
            found = _OPTION.match(text, end)
        return cls(name, options)

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{option}={_written(value)}" for option, value in self.options.items())])

    def build(self, registry: Registry[T]) -> T:
        """Build it by the registry.

        Raises:
            OptionError: no such name or option (with a suggestion), or a value that does not fit.
        """
        options: dict[str, Any] = dict(self.options)
        return registry.get(self.name)(**options)


def _value(text: str, begin: int) -> tuple[str, int]:
    """The value that begins at `begin`, without its quotes, and where it ends."""
    if text[begin : begin + 1] in ('"', "'"):
        quoted = _quoted(text, begin)
        return quoted[2].replace(quoted[1] * 2, quoted[1]), quoted.end()
    found = _OPTION.search(text, begin)
    end = found.start() if found else len(text)
    return text[begin:end], end


def _quoted(text: str, begin: int) -> re.Match[str]:
    quoted = _QUOTED.match(text, begin)
    if quoted is None:
        raise OptionError(
            f"{text.strip()!r}: the quote {text[begin]} behind {text[:begin].rpartition(':')[2]} must be closed before "
            "the next comma, option or end; one that belongs to the value is written twice"
        )
    return quoted


def _written(value: str) -> str:
    """A value as `Spec.parse` reads it again, in a list or alone."""
    if not value.startswith(('"', "'")) and "," not in value and value == value.strip() and not _OPTION.search(value):
        return value
    return '"' + value.replace('"', '""') + '"'


def _parts(text: str) -> list[str]:
    """The text between the commas that stand in no quotes."""
    parts, begin, place = [], 0, 0
    while place < len(text):
        option = _OPTION.match(text, place)
        if option and text[option.end() : option.end() + 1] in ('"', "'"):
            place = _quoted(text, option.end()).end()
        elif text[place] == ",":
            parts.append(text[begin:place])
            begin = place = place + 1
        else:
            place += 1
    return [*parts, text[begin:]]


def words(text: str, of: str) -> list[str]:
    """The parts of a list separated by commas, each once, in order.

    Raises:
        OptionError: the list is empty, or a quote is not closed.
    """
    parts = [part.strip() for part in _parts(text) if part.strip()]
    if not parts:
        raise OptionError(f"--{of} is empty; name at least one, several separated by commas")
    return list(dict.fromkeys(parts))


def parse_specs(text: str, of: str) -> list[Spec]:
    """Specs from a list separated by commas.

    Raises:
        OptionError: the list is empty, or a part cannot be read.
    """
    parts = words(text, of)
    for before, part in pairwise(parts):
        if "=" in before and _REST_OF_PATH.search(part.partition(":")[0]):
            raise OptionError(
                f"--{of}: {part!r} reads like the rest of a path that a comma has cut; put the whole value in quotes, "
                f"and those in the shell's: --{of} 'text:path=\"a,b.txt\"'"
            )
    return [Spec.parse(part) for part in parts]
