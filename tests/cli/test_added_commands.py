"""Commands of other packages, and those of millpond-lab where it is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from millpond.cli.app import COMMANDS, app
from millpond.install_command import install_command

LAB = [name for name, command in COMMANDS.items() if command is None]
#: Calls each command line in one process, and prints status and output of each.
CALL = """
import sys
from typer.testing import CliRunner
from millpond.cli.app import app
for line in sys.argv[1:]:
    done = CliRunner().invoke(app, line.split(), prog_name="millpond")
    print("==", done.exit_code, " ".join(done.output.split()))
"""
#: No package adds a command, the lab neither.
WITHOUT_LAB = """
import importlib.metadata
importlib.metadata.entry_points = lambda **group: ()
"""
PACKAGE = """
import typer

app = typer.Typer()

@app.command()
def one(n: int): "Count to one."; print("one", n)

@app.command()
def two(): "Count to two."

def greet(name: str = "you"): "Say hello."; print("hello", name)

def echo(context: typer.Context): "Say the same."; print("echo", *context.args)

NUMBER = 7
"""
ENTRY_POINTS = """[millpond.commands]
zz-greet = mine:greet
aa-count = mine:app
echo = mine:echo
gone = mine_too:run
number = mine:NUMBER
generate = mine:greet
"""


def outputs(code: str, *lines: str, path: str = "") -> list[tuple[int, str]]:
    environment = {**os.environ, "COLUMNS": "400", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code, *lines], capture_output=True, text=True, check=True, env=environment
    )
    parts = [part.strip().partition(" ") for part in done.stdout.split("==")[1:]]
    return [(int(status), text) for status, _, text in parts]


def test_the_help_lists_them_in_a_fixed_order() -> None:
    names = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert names[: len(COMMANDS)] == list(COMMANDS)
    assert LAB == ["fit", "eval", "eval-peer", "lm-eval", "plot", "leaderboard", "bench", "cluster", "train"]


def test_with_the_lab_every_command_is_its_own() -> None:
    for status, text in outputs(CALL, *(f"{name} --help" for name in LAB if name != "lm-eval")):
        assert status == 0
        assert "Usage: millpond" in text


def test_without_the_lab_its_commands_say_how_to_get_it() -> None:
    lines = [*(f"{name} --help" for name in LAB), "eval", "eval --model x --tasks y z", "bench kernels --rounds 3"]
    done = outputs(WITHOUT_LAB + CALL, "--help", *lines, "codecs")
    assert done[0][0] == 0
    assert done[0][1].count("In millpond-lab, which is not installed.") == len(LAB)
    assert done[-1][0] == 0, "the other commands are there"
    for line, refused in zip(lines, done[1:-1], strict=True):
        name = line.split()[0]
        said = f"error: 'millpond {name}' is in millpond-lab; install it with: {install_command('lab')}"
        assert refused == (2, said)


@pytest.fixture
def package(tmp_path: Path) -> str:
    """A folder of an installed package with commands, good ones and bad ones."""
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "mine.py").write_text(PACKAGE)
    return str(tmp_path)


def test_a_package_adds_functions_and_apps(package: str) -> None:
    lines = ("--help", "zz-greet --name anna", "aa-count one 1", "echo --help -x 3", "generate --help")
    (_, text), greeted, counted, echoed, generate = outputs(CALL, *lines, path=package)
    assert greeted == (0, "hello anna")
    assert counted == (0, "one 1")
    assert echoed == (0, "echo --help -x 3")
    assert "Generate text from a prompt" in generate[1], "a command of this package keeps its name"
    assert text.index("codecs") < text.index("echo") < text.index("zz-greet")


def test_one_that_cannot_be_loaded_says_so_when_it_is_called(package: str) -> None:
    gone, number, greeted = outputs(CALL, "gone --at all", "number", "zz-greet", path=package)
    assert gone == (
        2,
        "error: the package mine adds mine_too:run as 'millpond gone', which fails with ModuleNotFoundError: "
        "No module named 'mine_too'; repair or uninstall it",
    )
    assert number[0] == 2
    assert "mine:NUMBER as 'millpond number', which is neither a Typer app nor a function but of type int" in number[1]
    assert greeted == (0, "hello you")
