"""The demo on a model of the user's own."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.models.installed import OWN, SEPARATE
from tests.cli.test_cli import right, wrong
from tests.helpers.gguf.files import write_gguf
from tests.helpers.models import needs_real_model
from tests.helpers.package.snippets import agrees


def test_a_text_is_read_under_every_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "book.txt").write_text("the rain in the garden, and then the other thing. " * 20, encoding="utf-8")
    given = ("demo", "--model", str(tmp_path / "tiny.gguf"), "--text", str(tmp_path / "book.txt"))
    out = right(*given, "--length", "256", "--budget", "25%", "--question", "Is it [wet]?").output
    rows = dict(re.findall(r"^([a-z0-9]+(?: \d+%)?) {2,}\d+\.\d\d +\S+ +\S+ \S+ +(\d+)% ", out, re.MULTILINE))
    assert [*rows] == ["full", "light", "balanced", "h2o 25%", "snapkv 25%", "window 25%"]
    assert int(rows["window 25%"]) < 50 <= int(rows["full"])
    assert "Is it [wet]?" in out
    assert "than the full cache in" in " ".join(out.split())
    assert "512 tokens, and 4,128 are needed; name a longer text, or lower --length to" in wrong(
        *given[:-1], str(short(tmp_path)), "--length", "4000"
    )
    assert "--model and --text go together" in wrong("demo", "--text", str(tmp_path / "book.txt"))
    assert "cannot be read as UTF-8" in wrong(*given[:-1], str(tmp_path / "tiny.gguf"), "--length", "64")


def short(folder: Path) -> Path:
    (folder / "short.txt").write_text("x" * 512, encoding="utf-8")
    return folder / "short.txt"


def test_models_of_our_own_say_what_they_are(tmp_path: Path) -> None:
    """Where one is used unasked, and in the list: their answers are no claim."""
    chatted = CliRunner().invoke(app, ["chat", "--max-tokens", "2"], input="<ask> anna <is>\n")
    told = " ".join(chatted.stderr.split())
    assert "pond-recall is a tiny model of our own making: it knows pairs of a name and a thing" in told
    assert "`millpond models get smollm2-135m` gets a real one" in told
    assert "a tiny model of our own making" in " ".join(right("models").output.split())
    shown = right("demo", "--length", "128", "--questions", "2", "--methods", "full", "--out", str(tmp_path)).output
    assert "pond-recall is a tiny model of our own making" in " ".join(shown.split())
    assert sorted(OWN) == sorted({"pond-recall", *SEPARATE})


@pytest.mark.slow
@needs_real_model
def test_the_page_shows_what_was_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of `make demo-real`, and its answers."""
    monkeypatch.setenv("COLUMNS", "400")
    root = Path(__file__).parents[2]
    command = re.search(r"millpond (demo --model smollm2-135m .*)", (root / "Makefile").read_text(encoding="utf-8"))
    shown = re.search(
        r"```text\n(Who.*?)```", (root / "docs" / "how-to" / "install.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert command is not None
    assert shown is not None
    monkeypatch.chdir(root)
    printed = right(*shlex.split(command[1])).output.splitlines()
    for line in shown[1].splitlines():  # dots stand for what differs by processor
        assert any(agrees(line, one) for one in printed), line
