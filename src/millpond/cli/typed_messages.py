"""Messages of a person: typed at a terminal, where a pasted text of several lines is one, or read from a file."""

from __future__ import annotations

import select
import sys
from collections.abc import Iterator

#: At the end of a line: the message goes on in the next one.
GOES_ON = "\\"
#: Seconds in which the next line of a paste comes, where the terminal does not mark what is pasted.
PASTE_S = 0.05


def typed() -> Iterator[str]:
    r"""Yield the messages of the standard input; Ctrl-C begins a message again.

    A line is a message. At a terminal lines that are pasted are one message together, and Alt-Enter begins a new line;
    everywhere a line that ends in `\` goes on in the next one.
    """
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        _edit_lines()
    while True:
        try:
            yield _message(at_terminal)
        except EOFError:
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")


def _message(at_terminal: bool) -> str:
    """Return the next message.

    Raises:
        EOFError: there is none any more.
    """
    lines: list[str] = []
    while True:
        try:
            line = input("" if not at_terminal else ". " if lines else "> ")
        except EOFError:
            if not lines:
                raise
            return "\n".join(lines)
        if at_terminal and _more_there():
            lines.append(line)
        elif line.endswith(GOES_ON):
            lines.append(line.removesuffix(GOES_ON))
        else:
            return "\n".join([*lines, line])


def _more_there() -> bool:
    """Whether the next line has arrived already, as the lines of a paste have."""
    return bool(select.select([sys.stdin], [], [], PASTE_S)[0])


def _edit_lines() -> None:
    """Let input() know arrow keys, earlier messages, and what the terminal marks as pasted."""
    import readline

    if "libedit" not in (readline.__doc__ or ""):  # which knows neither; there pasted lines are there together
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')
