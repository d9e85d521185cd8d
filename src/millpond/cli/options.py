"""Method options on the command line: `-o name=value`, checked by the registry."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import typer

from millpond.errors import OptionError

#: A `typer.Option` whose default, None, needs no showing.
optional = partial(typer.Option, show_default=False)


def parse_options(pairs: Sequence[str]) -> dict[str, str]:
    """{"name": "value"} from ["name=value", ...]; what the text means is the registry's to decide.

    Raises:
        OptionError: no "=" in a pair, or a name given twice.

    Example:
        >>> parse_options(["recent=0.25", "sinks=4"])
        {'recent': '0.25', 'sinks': '4'}
    """
    options: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise OptionError(f"option {pair!r} must read name=value, for example recent=0.25")
        if name in options:
            raise OptionError(f"option {name!r} is given twice")
        options[name] = value
    return options
