"""Options as a command line gives them: `name=value`, once each."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.errors import OptionError


def parse_options(pairs: Sequence[str], example: str = "recent=0.25") -> dict[str, str]:
    """Return {"name": "value"} from ["name=value", ...]; the registry interprets the text.

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
            raise OptionError(f"option {pair!r} must read name=value, for example {example}")
        if name in options:
            raise OptionError(f"option {name!r} is given twice")
        options[name] = value
    return options
