"""Settings: fields of dataclasses that say what they mean, what they take, and what a command line calls them."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from millpond.errors import OptionError, unknown
from millpond.option_ranges import brief
from millpond.scalar import number

T = TypeVar("T")
Call = TypeVar("Call", bound=Callable[..., Any])

#: Key of a setting in the metadata of its field.
_KEY = "millpond.setting"
#: A name of another setting in a help.
_NAMED = re.compile(r"`(\w+)`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Meaning, range and flag of a field of a dataclass of settings.

    Attributes:
        help: What the setting decides, for a command line and a page; `name` refers to another setting.
        more: What the page adds.
        flag: Option of the command line; "": the field's name with hyphens.
        metavar: What the command line shows for the value; None: its type.
        at_least: Smallest value of a number; None: no limit.
        above: Number that the value must exceed; None: no limit.
        finite: Whether infinity is refused.
        choices: Texts that the setting takes; (): any.
        parse: Function that turns a text into the value, or raises `OptionError`.
        variable: Environment variable that the command line also reads; "": none.
        default_text: Meaning of a default of None or False; of another default, how it is written.
    """

    help: str
    more: str = ""
    flag: str = ""
    metavar: str | None = None
    at_least: float | None = None
    above: float | None = None
    finite: bool = False
    choices: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    variable: str = ""
    default_text: str = ""

    @property
    def rule(self) -> str:
        """Range of a number in words; "" if there is none."""
        parts = {"at least": self.at_least, "above": self.above}
        said = [f"{words} {end:g}" for words, end in parts.items() if end is not None]
        return " and ".join([*said, *(["finite"] if self.finite else [])])

    def checked(self, name: str, value: Any, whole: bool) -> Any:
        """Return the value as the field keeps it.

        Args:
            name: What a message calls the setting.
            value: What the user gave.
            whole: Whether a number must have no fraction.

        Raises:
            OptionError: The value is out of the range or not among the choices, or `parse` refuses it.
        """
        if self.choices and value not in self.choices:
            raise unknown(name, str(value), self.choices)
        if self.parse is not None:
            return self.parse(value)
        if not self.rule:
            return value
        value = number(value)
        kinds = int if whole else int | float
        if isinstance(value, bool) or not isinstance(value, kinds):
            kind = "a whole number" if whole else "a number"
            raise OptionError(f"{name}={brief(value)} must be {kind}, {self.rule}{self._way_out}")
        fits = [
            self.at_least is None or value >= self.at_least,
            self.above is None or value > self.above,
            value < math.inf or not self.finite,
        ]
        if not all(fits):
            raise OptionError(f"{name}={brief(value)} must be {self.rule}{self._way_out}")
        return value

    @property
    def _way_out(self) -> str:
        return f", or be left out for the default: {self.default_text}" if self.default_text else ""


def setting(default: T, help: str, **more: Any) -> T:
    """Return a field of a dataclass with a `Setting`.

    Args:
        default: Default of the field; a dictionary is copied.
        help: See `Setting`.
        **more: Other attributes of the `Setting`; `repr` of the field.

    Example:
        >>> @dataclass(frozen=True)
        ... class Page:
        ...     width: int = setting(80, "Characters of a line.", at_least=1)
        ...
        ...     def __post_init__(self) -> None:
        ...         check_settings(self)
        >>> Page(), settings_of(Page)["width"].help
        (Page(width=80), 'Characters of a line.')
        >>> Page(width=0)
        Traceback (most recent call last):
        millpond.errors.OptionError: width=0 must be at least 1
    """
    shown = {"repr": more.pop("repr", True), "metadata": {_KEY: Setting(help=help, **more)}}
    if isinstance(default, dict):
        return cast(T, dataclasses.field(default_factory=default.copy, **shown))
    return dataclasses.field(default=default, **shown)


def settings_of(kind: type) -> Mapping[str, Setting]:
    """Return the settings of a dataclass by the names of its fields, in their order.

    Raises:
        TypeError: `kind` is no dataclass.
    """
    settings = {field.name: field.metadata.get(_KEY) for field in dataclasses.fields(kind)}
    return {name: one for name, one in settings.items() if one is not None}


def check_settings(owner: Any) -> None:
    """Check every setting of a new dataclass; store numbers and parsed texts in its fields.

    A value of None is not checked where it is the default.

    Raises:
        OptionError: See `Setting.checked`.
        BudgetError: A value is not an amount of bytes.
    """
    kind = type(owner)
    defaults = {one.name: one for one in dataclasses.fields(kind)}
    for name, one in settings_of(kind).items():
        value = getattr(owner, name)
        if value is not None or defaults[name].default is not None:
            checked = one.checked(name, value, whole="float" not in str(defaults[name].type))
            if checked is not value:
                object.__setattr__(owner, name, checked)


def default_of(kind: type, name: str) -> Any:
    """Return the default of a field."""
    field = next(field for field in dataclasses.fields(kind) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def type_of(kind: type, name: str) -> Any:
    """Return the type of one field without evaluating the types of the others.

    Raises:
        NameError: The module imports the type for type checkers alone.
    """
    owner = next(one for one in kind.__mro__ if name in inspect.get_annotations(one))
    alone = SimpleNamespace(__annotations__={name: owner.__annotations__[name]})
    return typing.get_type_hints(alone, vars(sys.modules[owner.__module__]))[name]


def help_text(kind: type, name: str, write: Callable[[str], str], default: str | None = None) -> str:
    """Return the help of a setting, followed by what its default means.

    Args:
        kind: Dataclass of the setting.
        name: Field of the setting.
        write: Function that writes another setting named by the help.
        default: Text in place of what the default means.
    """
    one, own = settings_of(kind)[name], default_of(kind, name)
    means = one.default_text if default is None else default
    said = one.help
    if one.variable:
        said += f" Also: {one.variable}{', separated by commas' if own is not None else ''}."
    if means and (default or own in (None, False, ())):
        said += f" Default: {means}."
    return _NAMED.sub(lambda match: write(match[1]), said)


def flag_of(kind: type, name: str) -> str:
    """Return the flag of a setting, or of an option that only the command line has.

    Example:
        >>> flag_of(Setting, "page_slots")
        '--page-slots'
    """
    one = settings_of(kind).get(name)
    return one.flag if one is not None and one.flag else f"--{name.replace('_', '-')}"


def shows_options(*kinds: type) -> Callable[[Call], Call]:
    """Return a decorator that shows `**options` as settings, for `help` and completion."""

    def show(call: Call) -> Call:
        shown = inspect.signature(call)
        named = [one for one in shown.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        fields = [(kind, one) for kind in kinds for one in dataclasses.fields(kind) if one.name in settings_of(kind)]
        options = [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(kind, one.name), annotation=one.type
            )
            for kind, one in fields
        ]
        call.__signature__ = shown.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
        about = [f"    {one.name}: {help_text(kind, one.name, '`{}`'.format)}" for kind, one in fields]
        call.__doc__ = "\n".join([*([f"{call.__doc__.strip()}\n"] if call.__doc__ else []), "Options:", *about])
        return call

    return show


def split_options(owner: str, options: Mapping[str, Any], *kinds: type) -> tuple[dict[str, Any], ...]:
    """Split options among dataclasses: each gets those that are its settings.

    Args:
        owner: What a message calls the function that took the options.
        options: Keyword arguments by name.
        *kinds: Dataclasses of settings.

    Raises:
        TypeError: An option is a setting of none of them.

    Example:
        >>> @dataclass
        ... class Page:
        ...     width: int = setting(80, "Characters of a line.")
        >>> split_options("f", {"width": 3}, Page)
        ({'width': 3},)
        >>> split_options("f", {"widht": 3}, Page)
        Traceback (most recent call last):
        TypeError: f() takes no option 'widht'; did you mean 'width'?
    """
    names = [settings_of(kind).keys() for kind in kinds]
    known = {name for own in names for name in own}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            raise TypeError(f"{owner}() takes no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return tuple({name: value for name, value in options.items() if name in own} for own in names)
