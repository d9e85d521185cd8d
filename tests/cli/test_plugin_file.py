"""--plugin FILE: a method of a user's own on the command line, which is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from millpond.cli.app import app
from millpond.methods import METHODS
from tests.helpers.cli.plugin import NAME, plugin  # noqa: F401

GENERATE = ("generate", "--method", NAME, "--budget", "8", "--prompt", "anna kettle rain <ask> anna <is>")
#: A command line of each command that takes the option.
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": (*GENERATE, "--max-new-tokens", "2"),
    "generate on an engine": (*GENERATE, "--max-new-tokens", "2", "--weights", "int8"),
    "methods": ("methods", NAME),
    "bench methods": ("bench", "methods", "--quick", "--methods", NAME),
    "bench stream": ("bench", "stream", "--tokens", "100", "--methods", NAME),
    "bench batch": ("bench", "batch", "--quick", "--methods", NAME),
}


class Known(Exception):
    """A benchmark was about to run, and the method was known."""


def call(command: str, *more: str) -> Result:
    return CliRunner().invoke(app, [*COMMANDS[command], *more], env={"COLUMNS": "160", "NO_COLOR": "1"})


def stops(*_: Any) -> None:
    METHODS.get(NAME)
    raise Known


@pytest.mark.parametrize("command", COMMANDS)
def test_the_method_is_known(command: str, plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for name in ("methods.run", "stream", "batch"):
        monkeypatch.setattr(f"millpond_lab.bench.{name}.run", stops)
    result = call(command, "--plugin", str(plugin))
    if command.startswith("bench"):
        assert isinstance(result.exception, Known)
    else:
        assert result.exit_code == 0, result.output + str(result.exception)
    if command == "methods":
        assert "Keep the newest entries." in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "must be a Python file that registers methods"), ("import nothing_at_all", "fails with ModuleNotFoundErr")],
)
def test_a_file_that_adds_nothing_is_named(
    command: str,
    text: str | None,
    message: str,
    plugin: Path,  # noqa: F811
) -> None:
    plugin.unlink() if text is None else plugin.write_text(text)
    result = call(command, "--plugin", str(plugin))
    assert result.exit_code == 2
    assert f"plugin {plugin} {message}" in " ".join(result.stderr.split())


def test_without_it_the_method_is_unknown(plugin: Path) -> None:  # noqa: F811
    result = call("methods")
    assert result.exit_code == 2
    assert f"unknown method '{NAME}'" in " ".join(result.stderr.split())
