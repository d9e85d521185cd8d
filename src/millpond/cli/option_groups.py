"""Options that commands share, as one parameter: a dataclass with a field for each option."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

import typer

#: Name of the parameter through which typer passes the command's context.
_CONTEXT = "context"


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Base of option groups, whose fields are annotated as parameters of a command are.

    Attributes:
        given: names of the fields that the user set on the command line; no option itself.
    """

    given: frozenset[str] = frozenset()


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer, with every parameter of an `OptionGroup` type replaced by the options of that group.

    The default of such a parameter, a group, gives the defaults of the options; without one they are the fields' own.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[OptionGroup]] = {}
    options = [inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, OptionGroup):
            groups[name] = kind
            options += _options_of(kind, parameter.default)
        else:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        context: typer.Context = values.pop(_CONTEXT)
        for name, kind in groups.items():
            taken = {option: values.pop(option) for option in _names(kind)}
            sources = {option: context.get_parameter_source(option) for option in taken}
            given = {option for option, source in sources.items() if source and source.name == "COMMANDLINE"}
            values[name] = kind(**taken, given=frozenset(given))
        command(**values)

    run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _names(group: type[OptionGroup]) -> list[str]:
    return [field.name for field in fields(group) if field.name != "given"]


def _options_of(group: type[OptionGroup], default: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    usual = group() if default is inspect.Parameter.empty else default
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(usual, name), annotation=hints[name])
        for name in _names(group)
    ]
