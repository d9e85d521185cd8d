"""Option groups: a dataclass as a parameter of a command is one option for each of its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from millpond.cli.options import CacheChoice, OptionGroup, expand_groups
from millpond.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Size(OptionGroup):
    """Two numbers."""

    width: Annotated[int, typer.Option(min=1, help="Of the page.")] = 3
    height: int = 4


def run(command: Any, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(expand_groups(command))
    return CliRunner().invoke(app, list(arguments))


def test_the_fields_are_options_and_the_command_gets_the_group() -> None:
    seen: list[Any] = []

    def draw(*, name: Annotated[str, typer.Argument()], size: Size, colour: str = "red") -> None:
        seen.append((name, size, colour))

    assert run(draw, "page", "--width", "7").exit_code == 0
    assert seen == [("page", Size(width=7, height=4, given=frozenset({"width"})), "red")]
    assert "--given" not in run(draw, "--help").output
    assert run(draw, "page", "--width", "0").exit_code == 2


def test_a_command_may_have_defaults_of_its_own() -> None:
    seen: list[Size] = []
    usual = Size(width=9)

    def draw(*, size: Size = usual) -> None:
        seen.append(size)

    assert run(draw, "--height", "1").exit_code == 0
    assert seen == [Size(width=9, height=1, given=frozenset({"height"}))]


def test_a_preset_decides_what_the_command_line_does_not() -> None:
    assert CacheChoice(preset="light").kept() == {"method": "full", "codec": "int8", "budget": None}
    assert CacheChoice(method="kvzip").kept() == {"method": "kvzip", "codec": "auto", "budget": None}
    with pytest.raises(OptionError, match="--preset light decides the codec too"):
        CacheChoice(preset="light", codec="int4", given=frozenset({"preset", "codec"})).kept()


def test_an_engine_or_a_server_gets_what_the_user_chose_and_no_more() -> None:
    assert CacheChoice().for_request() == {}
    assert CacheChoice(codec="int8", given=frozenset({"codec"})).for_request() == {"codec": "int8"}
    assert CacheChoice(preset="light", option=["a=1"]).for_request() == {"preset": "light", "options": {"a": "1"}}
