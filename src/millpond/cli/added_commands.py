"""Commands that other packages add to `millpond`, and refusals for commands of packages that are not installed."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points

import typer

from millpond.errors import OptionError
from millpond.install_command import install_command

Command = typer.Typer | Callable[..., None]

#: Entry points of this group name a Typer app or a function each.
GROUP = "millpond.commands"
#: Of a command that reads all of its arguments itself.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def added_commands(lab: Iterable[str]) -> dict[str, Command]:
    """Return commands by name, sorted: those of installed packages, and those of millpond-lab.

    One that cannot be imported reports that when it is called.

    Args:
        lab: Names of commands of millpond-lab; where it is not installed, calling one says how to get it.
    """
    commands: dict[str, Command] = {}
    for point in entry_points(group=GROUP):
        if point.name not in commands:
            commands[point.name] = _load(point)
    for name in lab:
        if name not in commands:
            commands[name] = _refusing(
                f"'millpond {name}' is in millpond-lab; install it with: {install_command('lab')}",
                "In millpond-lab, which is not installed.",
            )
    return dict(sorted(commands.items()))


def add_command(app: typer.Typer, name: str, command: Command) -> None:
    """Add a command to an app; a function of the context alone reads its arguments itself."""
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name, context_settings=PASSED_ON if _reads_arguments(command) else None)(command)


def _load(point: EntryPoint) -> Command:
    try:
        command = point.load()
        if isinstance(command, typer.Typer) or callable(command):
            return typing.cast(Command, command)
        reason = f"is neither a Typer app nor a function but of type {type(command).__name__}"
    except Exception as error:  # of any kind: it is not our code
        reason = f"fails with {type(error).__name__}: {error}"
    owner = f"the package {point.dist.name}" if point.dist is not None else "an installed package"
    return _refusing(
        f"{owner} adds {point.value} as 'millpond {point.name}', which {reason}; repair or uninstall it",
        "Cannot be imported; call it to see why.",
    )


def _refusing(message: str, summary: str) -> Callable[..., None]:
    """Return a command that refuses any arguments with this message."""

    def refuse(context: typer.Context) -> None:
        raise OptionError(message)

    refuse.__doc__ = summary
    return refuse


def _reads_arguments(command: Callable[..., None]) -> bool:
    parameters = list(inspect.signature(command).parameters)
    return len(parameters) == 1 and typing.get_type_hints(command).get(parameters[0]) is typer.Context
