"""Registry of builders by name; a builder is a function whose signature documents its options.

An option is `Annotated[type, "help"]`. One that names a file says so: `Annotated[str, "help", FILE]`, see
`millpond.option_files`. One that is a number declares its range: `Annotated[int, "help", Range(1, 64)]`, see
`millpond.option_ranges`.

A registry finds its entries by importing every module of a package folder, so that dropping a file in registers it, and
what installed packages name under a group of entry points, so that others can add their own.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import threading
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Literal, TypeVar

from millpond.errors import OptionError, unknown
from millpond.install_command import install_command
from millpond.option_files import FILE, OptionFile, OwnText, ReadWhenNamed, allowed, only_listed
from millpond.option_ranges import UNDECLARED, Range, brief
from millpond.scalar import number

T = TypeVar("T")

#: Around text, which is a number where a command line or a nested method gives it.
QUOTES = "'"


@dataclass(frozen=True, slots=True)
class Option:
    """Option of a builder as a command line, a config file or a documentation page needs it.

    Attributes:
        is_file: Whether its value names a file.
        ranges: Ranges of each kind of number that it takes, in the order of its type; () if none was declared.
    """

    name: str
    annotation: Any
    default: Any
    help: str
    is_file: bool = False
    ranges: tuple[Range, ...] = ()

    @property
    def choices(self) -> tuple[Any, ...]:
        """Allowed values, empty if the type alone decides."""
        return typing.get_args(self.annotation) if typing.get_origin(self.annotation) is Literal else ()

    @property
    def type_name(self) -> str:
        """Type as a user reads it: "int or float", or the choices."""
        return "path" if self.is_file else " | ".join(map(str, self.choices)) or _spell(self.annotation)

    @property
    def numbers(self) -> dict[Any, Range]:
        """Range of each kind of number that it takes: int, float or both."""
        kinds = _kinds_of_numbers(self.annotation)
        return dict(zip(kinds, self.ranges or [UNDECLARED] * len(kinds), strict=True))

    @property
    def range_text(self) -> str:
        """Numbers that it takes as a user reads them; "" if it takes none."""
        return " or ".join(dict.fromkeys(map(str, self.numbers.values())))

    def checked(self, value: Any, owner: str, *, typed: bool = False) -> Any:
        """Return `value` as this option's type.

        Args:
            value: Value that a user gave.
            owner: Name of the builder, for errors.
            typed: Refuse text for a number; else it is converted, as a command line needs it.

        Raises:
            OptionError: it is not one of the choices, not of the type, not in its range, or names a file that may not
                be named.
        """
        if self.is_file and isinstance(value, str):
            return allowed(value, f"{owner}: {self.name}")
        value = number(value)
        if self.choices:
            if value not in self.choices:
                raise OptionError(
                    f"{owner}: {self.name}={brief(value)} must be one of {', '.join(map(repr, self.choices))}"
                )
            return value
        ranges = self.numbers
        for kind in _alternatives(self.annotation):
            try:
                converted = _convert(value, kind)
            except (TypeError, ValueError, OverflowError):
                continue
            if typed and isinstance(value, str) and kind is not str:
                break
            if kind in ranges and not ranges[kind].holds(converted):
                raise OptionError(f"{owner}: {self.name}={brief(value).strip(QUOTES)} must be {self.range_text}")
            return converted
        within = f", {self.range_text}" if ranges else ""
        raise OptionError(f"{owner}: {self.name}={brief(value)} is not a valid {_spell(self.annotation)}{within}")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _kinds_of_numbers(annotation: Any) -> list[Any]:
    return [kind for kind in _alternatives(annotation) if kind in (int, float)]


def _spell(annotation: Any) -> str:
    return " or ".join(getattr(kind, "__name__", str(kind)) for kind in _alternatives(annotation))


def _convert(value: Any, kind: Any) -> Any:
    if kind is type(None):
        if value is None:
            return None
        raise ValueError("not None")
    if kind is bool:
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "1", "0"):
            return value.lower() in ("true", "yes", "1")
        if isinstance(value, bool):
            return value
        raise ValueError("not a bool")
    if isinstance(value, bool):
        raise ValueError("a bool is not a number")
    if kind is int:
        if isinstance(value, float):
            raise ValueError("not whole")
        return int(value)
    if kind is float:
        number = float(value)
        if number != number:
            raise ValueError("NaN")
        return number
    if kind is str:
        if isinstance(value, str):
            return value
        raise ValueError("not text")
    if isinstance(value, kind):
        return value
    raise ValueError(f"not a {kind}")


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """Registered builder with its name, options and paper."""

    name: str
    build: Callable[..., T]
    paper: str
    options: dict[str, Option]

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.build) or "").split("\n")[0]

    def with_files_read(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options with the files that they name read now, and not again.

        Options may name files themselves or inside a text.

        Raises:
            OptionError: a file cannot be read, or the options are not as they must be.
        """
        read = ReadWhenNamed()
        with only_listed(read):
            self(**options)
        options_read = dict(options)
        for name, value in options.items():
            if read and isinstance(value, str) and value and not isinstance(value, OptionFile | OwnText):
                options_read[name] = read[value] if self.options[name].is_file else OwnText(value, read)
        return options_read

    def check(self, options: Mapping[str, Any], *, typed: bool = False) -> dict[str, Any]:
        """Return the options as the builder takes them; typed: see `Option.checked`.

        Raises:
            OptionError: an unknown option (with a suggestion) or a value that does not fit.
        """
        checked = {}
        for name, value in options.items():
            if name not in self.options:
                raise unknown(f"option of {self.name}", name, self.options)
            checked[name] = self.options[name].checked(value, self.name, typed=typed)
        return checked

    def __call__(self, **options: Any) -> T:
        """Build with checked options.

        Raises:
            OptionError: see `check`; or values that do not go together.
        """
        return self.build(**self.check(options))


class Registry(Generic[T]):
    """Builders by name, filled on first use by a package's modules and by entry points.

    Args:
        kind: Product of a builder, for messages.
        package: Name of a package whose modules register builders.
        group: Group of the entry points that name modules of other packages; None for the name of `package`.
        extras: Names of builders that extras of this package install, by extra: an error about a name says so.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        *,
        group: str | None = None,
        extras: Mapping[str, Collection[str]] = types.MappingProxyType({}),
    ) -> None:
        self.kind = kind
        self._package, self._group = package, group or package
        self._extras = extras
        self._entries: dict[str, Entry[T]] = {}
        self._walked = self._complete = False
        self._lock = threading.RLock()  # modules that are walked over look names up themselves

    def register(self, name: str, paper: str = "") -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Return a decorator that registers a builder under `name`."""

        def file(build: Callable[..., T]) -> Callable[..., T]:
            if name in self._entries:
                raise OptionError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = Entry(name, build, paper, _options_of(build))
            return build

        return file

    def names(self) -> list[str]:
        """Return all names, sorted."""
        self._walk()
        return sorted(self._entries)

    def get(self, name: str) -> Entry[T]:
        """Return the entry called `name`.

        Raises:
            OptionError: there is none, with the closest name as a suggestion, or what installs it.
        """
        self._walk()
        if name not in self._entries:
            raise self._unknown(name)
        return self._entries[name]

    def _unknown(self, name: str) -> OptionError:
        text = str(unknown(self.kind, name, self._entries))
        for extra, names in self._extras.items():
            if name in names:
                return OptionError(
                    f"{self.kind} {name!r} is in millpond-{extra}; install it with: {install_command(extra)}"
                )
            if missing := sorted({*names} - self._entries.keys()):
                text += f"; in millpond-{extra} ({install_command(extra)}): {', '.join(missing)}"
        return OptionError(text)

    def _walk(self) -> None:
        if self._complete:
            return
        with self._lock:
            if self._walked:
                return
            self._walked = True
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
            for point in entry_points(group=self._group):
                self._load(point)
            self._complete = True

    def _load(self, point: EntryPoint) -> None:
        """Import the module of another package.

        Raises:
            OptionError: it cannot be imported, or it takes a name that is taken.
        """
        try:
            point.load()
        except Exception as error:  # of any kind: it is not our code
            self._walked = False  # so that it is said again, not forgotten
            owner = f"the package {point.dist.name}" if point.dist is not None else "an installed package"
            raise OptionError(
                f"{owner} adds {point.value} as a {self.kind}, which fails with {type(error).__name__}: {error}; "
                "repair or uninstall it"
            ) from error


def _options_of(build: Callable[..., Any]) -> dict[str, Option]:
    hints = typing.get_type_hints(build, include_extras=True)
    options = {}
    for name, parameter in inspect.signature(build).parameters.items():
        hint, text, is_file = hints[name], "", False
        ranges: tuple[Range, ...] = ()
        if typing.get_origin(hint) is typing.Annotated:
            hint, text, *more = typing.get_args(hint)
            is_file = FILE in more
            ranges = tuple(part for part in more if isinstance(part, Range))
        if len(ranges) not in (0, kinds := len(_kinds_of_numbers(hint))):
            raise OptionError(f"option {name!r} declares {len(ranges)} ranges and takes {kinds} kinds of numbers")
        options[name] = Option(name, hint, parameter.default, text, is_file, ranges)
    return options
