"""What a command line writes: names with options, "h2o:recent=0.1:sinks=0", in lists separated by commas."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

from millpond.errors import OptionError
from millpond.registry import Registry

T = TypeVar("T")

#: A colon begins an option only before `name=`, so that a value may hold one (a path on another drive).
_OPTION = re.compile(r":(?=[A-Za-z_]\w*=)")


@dataclass(frozen=True)
class Spec:
    """A name with options as text; what the text means is the registry's to decide.

    Example:
        >>> Spec.parse("h2o:recent=0.1:sinks=0").options
        {'recent': '0.1', 'sinks': '0'}
        >>> str(Spec.parse("h2o:sinks=0"))
        'h2o:sinks=0'
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Spec:
        """A spec from `name[:option=value...]`.

        Raises:
            OptionError: no name, something that is no option behind it, or an option given twice.
        """
        name, *parts = _OPTION.split(text.strip())
        if not name or ":" in name or "=" in name:
            raise OptionError(f"{text.strip()!r} must read name or name:option=value, for example h2o:recent=0.25")
        options: dict[str, str] = {}
        for part in parts:
            option, _, value = part.partition("=")
            if option in options:
                raise OptionError(f"{text.strip()!r}: option {option!r} is given twice")
            options[option] = value
        return cls(name, options)

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{option}={value}" for option, value in self.options.items())])

    def build(self, registry: Registry[T]) -> T:
        """What the registry makes of it.

        Raises:
            OptionError: no such name or option (with a suggestion), or a value that does not fit.
        """
        options: dict[str, Any] = dict(self.options)
        return registry.get(self.name)(**options)


def words(text: str, of: str) -> list[str]:
    """The parts of a list separated by commas, each once, in order.

    Raises:
        OptionError: the list is empty.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise OptionError(f"--{of} is empty; name at least one, several separated by commas")
    return list(dict.fromkeys(parts))


def parse_specs(text: str, of: str) -> list[Spec]:
    """Specs from a list separated by commas.

    Raises:
        OptionError: the list is empty, or a part cannot be read.
    """
    return [Spec.parse(part) for part in words(text, of)]
