"""Options of the command line that are settings of a dataclass: flag, type, help and default."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer

from millpond.setting import default_of, flag_of, help_text, settings_of, type_of


def option_of(kind: type, name: str, *, default_text: str | None = None, show_default: bool | None = None) -> Any:
    """Return a setting of `kind` as a `typer.Option`.

    Args:
        kind: Class of the settings.
        name: Name of the field.
        default_text: What the default means, where a command has another than the setting.
        show_default: As of `typer.Option`; None: unless the default is None.
    """
    one = settings_of(kind)[name]
    shown = usual_of(kind, name) is not None if show_default is None else show_default
    about = help_text(kind, name, lambda other: flag_of(kind, other), default_text)
    return typer.Option(flag_of(kind, name), help=about, metavar=one.metavar, min=one.at_least, show_default=shown)


def usual_of(kind: type, name: str) -> Any:
    """Return the default of an option, as its setting is written; None for an empty list."""
    default = default_of(kind, name)
    if isinstance(default, tuple | Mapping):
        return None
    return settings_of(kind)[name].default_text or default if default not in (None, False) else default


def parameter_of(kind: type, name: str, usual: Any) -> inspect.Parameter:
    """Return a setting of `kind` as a parameter of a command, whose default is `usual`."""
    taken = _taken(kind, name)
    default_text = None if usual in (None, False) else ""  # the default itself is shown
    option = option_of(kind, name, default_text=default_text, show_default=usual is not None)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=usual,
        annotation=Annotated[taken if usual is not None else taken | None, option],
    )


def value_of(kind: type, name: str, value: Any) -> Any:
    """Return the field's value for that of its option: several are a tuple."""
    return tuple(value or ()) if get_origin(type_of(kind, name)) is tuple else value


def _taken(kind: type, name: str) -> Any:
    """Return the type that typer reads.

    It is a path, a number, a switch, a list, or a text, which the setting reads itself.
    """
    one, hint = settings_of(kind)[name], type_of(kind, name)
    if get_origin(hint) in (tuple, Mapping):
        return list[str]
    if one.parse is not None or one.choices:
        return str
    parts = [part for part in get_args(hint) or (hint,) if part is not NoneType]
    if any(get_origin(part) is PathLike for part in parts):
        return Path
    return parts[0] if len(parts) == 1 else str
