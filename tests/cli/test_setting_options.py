"""Settings of dataclasses on the command line: a flag for each, with its help, and values that reach the dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
import typer
import typer.main
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.cli.options import OptionGroup, expand_groups
from millpond.cli.serve import Access, EngineChoice, RequestLimits, Workers
from millpond.cluster.settings import ClusterSettings
from millpond.engine.settings import EngineSettings, LoadSettings
from millpond.server.settings import ServerSettings
from millpond.setting import check_settings, flag_of, setting, settings_of

#: Settings that `millpond serve` has no flag for, and why.
NOT_ON_THE_COMMAND_LINE = {
    "options": "--option of `CacheChoice`, one at a time",
    "max_running": "--kv-memory limits what runs together",
    "overcommit": "for experiments",
    "spread_ages": "a plan sets it",
    "page_slots": "for experiments",
    "native_layers": "for experiments; --runner says most of it",
    "tokenizer": "an object",
    "image_processor": "an object; that of the model is loaded",
    "plan": "the fastest is searched for",
    "prompt_tokens": "of a plan: `millpond plan`",
    "new_tokens": "of a plan: `millpond plan`",
    "machine": "an object",
    "verify": "for doubtful disks, from Python",
    "max_replays": "of clusters from Python",
    "hang_s": "of clusters from Python",
    "lease_s": "of clusters from Python",
}


def of_serve() -> dict[str, click.Parameter]:
    command: Any = typer.main.get_command(app)
    return {flag: option for option in command.commands["serve"].params for flag in option.opts}


def test_every_setting_has_a_help_and_a_flag_or_a_reason() -> None:
    flags, missing = of_serve(), set()
    for kind in (EngineSettings, LoadSettings, ClusterSettings, ServerSettings):
        assert list(settings_of(kind)) == [field.name for field in fields(kind)]
        for name, one in settings_of(kind).items():
            assert one.help.endswith(".")
            if flag_of(kind, name) in flags:
                said = str(getattr(flags[flag_of(kind, name)], "help", ""))
                assert said.startswith(one.help.split("`")[0])
            else:
                missing.add(name)
    assert missing == NOT_ON_THE_COMMAND_LINE.keys()


@pytest.mark.parametrize("group", [EngineChoice, Workers, RequestLimits, Access])
def test_groups_name_every_option_once_and_what_there_is(group: type[OptionGroup]) -> None:
    own = {field.name for field in fields(group)} - {"given", "settings"}
    assert len({*group.order}) == len(group.order)
    assert own <= {*group.order} <= own | settings_of(group.kind).keys()
    assert group.usual.keys() <= settings_of(group.kind).keys()


def test_the_defaults_of_the_command_line_are_those_of_the_settings() -> None:
    assert ServerSettings(**RequestLimits().settings) == ServerSettings()
    assert ClusterSettings(**Workers().settings) == ClusterSettings()
    engine = EngineSettings(**EngineChoice().as_arguments())
    assert engine == EngineSettings(budget_floor=engine.budget_floor)


@dataclass(frozen=True, kw_only=True)
class Page:
    """One of each kind of setting."""

    width: int = setting(80, "Of a line.", at_least=1)
    folder: Path | None = setting(None, "Of pages.", default_text="none")
    size: int = setting(2**20, "With `width`.", flag="--page-size", parse=int, default_text="1048576")
    names: tuple[str, ...] = setting((), "Of it.", flag="--name")
    plain: bool = setting(False, "No colours.", default_text="colours")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class Paper(OptionGroup):
    """Settings, and an option of its own between them."""

    kind = Page
    order = ("width", "colour", "folder", "size", "names", "plain")
    usual: ClassVar[Mapping[str, Any]] = {"width": 72}

    colour: str = "red"


def run(*arguments: str) -> tuple[Paper, Any]:
    seen: list[Paper] = []

    def draw(*, paper: Paper) -> None:
        seen.append(paper)

    drawn = typer.Typer()
    drawn.command()(expand_groups(draw))
    done = CliRunner().invoke(drawn, list(arguments), env={"COLUMNS": "200"})
    return (seen or [Paper()])[0], done


def test_values_reach_the_dataclass() -> None:
    given = ["--width", "7", "--page-size", "9", "--name", "a", "--name", "b", "--plain", "--colour", "blue"]
    paper, _ = run(*given)
    assert Page(**paper.settings) == Page(width=7, size=9, names=("a", "b"), plain=True)
    assert (paper.colour, paper.given) == ("blue", {"width", "size", "names", "plain", "colour"})
    paper, _ = run()
    assert Page(**paper.settings) == Page(width=72)
    assert paper == Paper() == Paper(settings={"width": 72})


def test_a_number_below_its_least_is_refused_and_help_names_flags() -> None:
    assert run("--width", "0")[1].exit_code == 2
    said = run("--help")[1].output
    places = [said.index(flag) for flag in ("--width", "--colour", "--folder", "--page-size", "--name", "--plain")]
    assert places == sorted(places)
    assert "Of pages. Default: none." in said
    assert "No colours. Default: colours." in said
