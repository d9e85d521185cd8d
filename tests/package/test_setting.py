"""Settings: fields of dataclasses with a help, a range, and a name on the command line."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from millpond.budget import parse_bytes
from millpond.errors import BudgetError, OptionError
from millpond.setting import check_settings, flag_of, help_text, setting, settings_of, shows_options, split_options


@dataclass(frozen=True, kw_only=True)
class Page:
    """One of each kind."""

    width: int = setting(80, "Characters of a line.", at_least=1)
    pause_s: float = setting(1.0, "Seconds between two of `width`.", above=0, finite=True, flag="--pause")
    lines: int | None = setting(None, "Lines, at most.", at_least=0, default_text="those of `width`")
    side: str = setting("left", "left or right.", choices=("left", "right"))
    size: int = setting(2**20, "Bytes, at most.", parse=parse_bytes, default_text="1MiB")
    names: dict[str, int] = setting({}, "Names.")
    plain: int = 0

    def __post_init__(self) -> None:
        check_settings(self)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"width": 0}, "^width=0 must be at least 1$"),
        ({"width": 1.5}, "^width=1.5 must be a whole number, at least 1$"),
        ({"width": True}, "^width=True must be a whole number, at least 1$"),
        ({"width": None}, "^width=None must be a whole number, at least 1$"),
        ({"pause_s": 0}, "^pause_s=0 must be above 0 and finite$"),
        ({"pause_s": math.inf}, "^pause_s=inf must be above 0 and finite$"),
        ({"pause_s": math.nan}, "^pause_s=nan must be above 0 and finite$"),
        ({"pause_s": "1"}, "^pause_s='1' must be a number, above 0 and finite$"),
        ({"lines": -1}, "^lines=-1 must be at least 0, or be left out for the default: those of `width`$"),
        ({"side": "rigt"}, "^unknown side 'rigt'; did you mean 'right'"),
    ],
)
def test_a_value_out_of_its_range_is_named_with_the_rule(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Page(**given)


def test_numbers_and_texts_are_kept_as_the_field_s_type() -> None:
    given: Any = {"width": np.int64(7), "size": "2MiB"}
    page = Page(**given)
    assert (page.width, type(page.width), page.size) == (7, int, 2**21)
    assert page.lines is None
    assert Page().names is not Page().names
    with pytest.raises(BudgetError, match="'much'"):
        Page(size="much")  # type: ignore[arg-type]


def test_a_help_names_other_settings_as_its_reader_does() -> None:
    assert help_text(Page, "pause_s", lambda name: flag_of(Page, name)) == "Seconds between two of --width."
    assert help_text(Page, "lines", "`{}`".format) == "Lines, at most. Default: those of `width`."
    assert help_text(Page, "size", "`{}`".format) == "Bytes, at most."
    assert flag_of(Page, "pause_s") == "--pause"
    assert "plain" not in settings_of(Page)


def test_a_constructor_shows_its_options() -> None:
    @shows_options(Page)
    def make(name: str, **options: Any) -> tuple[dict[str, Any], ...]:
        """A page."""
        return split_options("make", options, Page)

    shown = inspect.signature(make).parameters
    assert list(shown) == ["name", "width", "pause_s", "lines", "side", "size", "names"]
    assert (shown["width"].default, shown["names"].default) == (80, {})
    assert str(make.__doc__).startswith("A page.\n\nOptions:\n    width: Characters of a line.\n")
    assert make("a", width=3) == ({"width": 3},)
    with pytest.raises(TypeError, match=r"make\(\) takes no option 'widt'; did you mean 'width'"):
        make("a", widt=3)
