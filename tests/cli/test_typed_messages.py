"""What is one message of a chat: at a terminal, with pastes that it marks and that it does not, and in a file."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

import pytest

from millpond.cli.chat import typed
from tests.helpers.cli.terminal import Terminal
from tests.helpers.server.fake_openai import FakeServer

#: Writes each message as JSON on a line of its own.
SAYS = """
import json, sys
from millpond.cli.chat import typed
for message in typed():
    sys.stdout.write("\\nGOT " + json.dumps(message) + " END\\n")
    sys.stdout.flush()
"""
#: A readline that marks nothing, as macOS has: only its name is another.
PLAIN = "import readline\nreadline.__doc__ = 'libedit'\nreadline.parse_and_bind('set enable-bracketed-paste off')\n"
MARKS, PASTE, PASTED = "\x1b[?2004h", "\x1b[200~", "\x1b[201~"
ALT_ENTER, ENTER = "\x1b\r", "\r"
TEXT = ["def f(x):", "    return x  # é", "", "/not a command", "what does f do?"]


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal([sys.executable, "-c", SAYS]) as opened:
        opened.wait(MARKS)  # the terminal is asked to mark what is pasted
        opened.wait("> ")
        yield opened


def got(terminal: Terminal) -> str:
    terminal.wait("GOT ")
    message: str = json.loads(terminal.wait(" END").removesuffix(" END"))
    terminal.wait("> ")
    return message


def test_a_paste_is_one_message_and_waits_for_enter(terminal: Terminal) -> None:
    terminal.write(PASTE + "\r".join(TEXT) + PASTED)
    terminal.write(" please" + ENTER)
    assert got(terminal) == "\n".join(TEXT) + " please"
    terminal.write("and now?" + ENTER)
    assert got(terminal) == "and now?"


def test_a_long_paste_is_one_message(terminal: Terminal) -> None:
    lines = [f"line {number} of a text that somebody brings" for number in range(300)]
    terminal.write(PASTE + "\r".join(lines) + PASTED + ENTER)
    assert got(terminal) == "\n".join(lines)


def test_lines_are_typed_with_alt_enter_or_a_backslash(terminal: Terminal) -> None:
    terminal.write("one" + ALT_ENTER + "two")
    terminal.write(ENTER)
    assert got(terminal) == "one\ntwo"
    terminal.write("three\\" + ENTER)
    terminal.wait(". ")
    terminal.write("four" + ENTER)
    assert got(terminal) == "three\nfour"


@pytest.mark.parametrize("last", ["", ENTER], ids=["no line end", "line end"])
def test_lines_that_are_there_together_are_one_message_where_nothing_is_marked(last: str) -> None:
    with Terminal([sys.executable, "-c", PLAIN + SAYS]) as terminal:
        terminal.wait("> ")
        terminal.write("\r".join(TEXT) + last)
        if not last:
            terminal.wait(". what does f do?")
            terminal.write(ENTER)
        assert got(terminal) == "\n".join(TEXT)
        terminal.write("and now?" + ENTER)
        assert got(terminal) == "and now?"


def test_a_pasted_text_reaches_the_model_as_one_turn() -> None:
    with (
        FakeServer().running() as server,
        Terminal([sys.executable, "-m", "millpond", "chat", "--url", server.url, "--max-tokens", "3"]) as terminal,
    ):
        terminal.wait("> ")
        terminal.write(PASTE + "\r".join(["/etc/hosts says:", *TEXT]) + PASTED + ENTER)
        terminal.wait("w0 w1 w2")
        terminal.wait("> ")
        terminal.write("/stats" + ENTER)
        terminal.wait("tokens/s")
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "user", "content": "\n".join(["/etc/hosts says:", *TEXT])}]
    ]


def test_of_a_file_each_line_is_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\\\nthree\n\nfour\\"))
    assert list(typed()) == ["one", "two\nthree", "", "four"]
    assert capsys.readouterr().out == "", "no prompts between the answers"
