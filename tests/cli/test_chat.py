"""`millpond chat`, with the bundled model and with a server that says what it is told."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from millpond.cli.app import app
from millpond.cli.chat import converse
from millpond.cli.chat_backend import LocalBackend, Message
from millpond.engine.llm import LLM
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import DataError
from tests.helpers.server.fake_openai import FakeServer

#: What `pond-recall` was trained for: pairs to remember, and a question for one of them.
PAIRS = "the key of the red box is seven ."


def say(*typed: str, options: Sequence[str] = ()) -> Result:
    return CliRunner().invoke(app, ["chat", *options], input="".join(f"{line}\n" for line in typed))


class Echo:
    """Answers with what it was sent, word by word."""

    name = "echo"

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        self.asked.append([dict(message) for message in messages])
        text = messages[-1]["content"]
        if text == "fail":
            raise DataError("no answer to that")
        for word in text.split():
            if word == "interrupt":
                raise KeyboardInterrupt
            yield f"<{word}>"

    def last(self) -> str:
        return "about the last"

    def forgotten(self) -> str:
        return ""


def roles(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_a_conversation_grows(capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    converse(echo, iter(["a b", "", "c"]), system="be kind")
    assert capsys.readouterr().out == "<a><b>\n<c>\n"
    assert roles(echo.asked[1]) == [("system", "be kind"), ("user", "a b"), ("assistant", "<a><b>"), ("user", "c")]


def test_reset_stats_help_and_quit(capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    converse(echo, iter(["a", "/reset", "b", "/stats", "/help", "/what", " /quit ", "never"]), system="be kind")
    told = capsys.readouterr().err
    assert [roles(asked) for asked in echo.asked] == [
        [("system", "be kind"), ("user", "a")],
        [("system", "be kind"), ("user", "b")],
    ]
    assert "about the last" in told
    assert "/reset" in told
    assert "/what is unknown" in told


def test_an_error_costs_its_turn_only(capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    converse(echo, iter(["fail", "a"]))
    assert roles(echo.asked[1]) == [("user", "a")]
    assert "no answer to that" in capsys.readouterr().err


def test_an_interrupted_answer_is_kept_as_far_as_it_came() -> None:
    echo = Echo()
    converse(echo, iter(["a interrupt b", "c"]))
    assert roles(echo.asked[1]) == [("user", "a interrupt b"), ("assistant", "<a>"), ("user", "c")]


def test_with_the_bundled_model() -> None:
    done = say(PAIRS, "/stats", "/reset", PAIRS, options=["--temperature", "0", "--max-tokens", "5"])
    assert done.exit_code == 0, done.output
    first, second = done.stdout.strip().split("\n")
    assert first == second != ""
    assert "KV" in done.stderr
    assert " new tokens at " in done.stderr


def test_each_turn_says_what_it_has_forgotten() -> None:
    many = " ".join([PAIRS] * 30)
    options = ["--temperature", "0", "--max-tokens", "5", "--method", "window", "--budget", "25%"]
    options += ["--budget-floor", "0"]
    done = say(many, "/stats", many, options=options)
    assert done.exit_code == 0, done.output
    shares = re.findall(r"of the prompt (\d+)\.\d% held by no head, (\d+)\.\d% by fewer than half", done.stderr)
    assert len(shares) == 3, "two turns and /stats"
    assert all(70 <= int(share) <= 80 for pair in shares for share in pair)
    done = say(many, options=["--temperature", "0", "--max-tokens", "5", "--method", "full"])
    assert "of the prompt" not in done.stderr, "nothing was forgotten, and nothing is said"


def test_a_prompt_that_is_too_long_is_no_end() -> None:
    done = say("a " * 50_000, PAIRS, options=["--temperature", "0", "--max-tokens", "2"])
    assert done.exit_code == 0, done.output
    assert "context" in done.stderr
    assert done.stdout.strip()


def test_ctrl_c_between_two_steps() -> None:
    with LLM("pond-recall", budget=64) as llm:
        partner = LocalBackend(llm, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True), "pond-recall")
        stream = partner.answer([{"role": "user", "content": PAIRS}])
        assert next(stream)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        llm.engine.check_integrity()
        assert not llm.engine.busy
        assert "".join(partner.answer([{"role": "user", "content": PAIRS}]))


def test_without_a_template_names_are_written() -> None:
    with LLM("pond-recall", budget=64) as llm:
        llm.tokenizer.chat_template = None
        partner = LocalBackend(llm, SamplingParams(max_tokens=3), "pond-recall")
        ids = partner._encode([{"role": "user", "content": "red"}])
        assert ids == tuple(llm.tokenizer.encode("User: red\nAssistant:"))
        assert partner._params.stop == ("\nUser:",)


def test_with_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    with FakeServer().running() as server:
        url = ["--url", f"{server.url}/v1", "--max-tokens", "3", "--key-variable", "SOME_KEY"]
        done = say("hello", "again", "/stats", options=[*url, "--method", "tova", "-o", "skip=1"])
    assert done.stdout == "w0 w1 w2 \nw0 w1 w2 \n"
    assert "11 tokens" in done.stderr
    assert "fake-1" in done.stderr
    assert [roles(body["messages"]) for body in server.bodies][1] == [
        ("user", "hello"),
        ("assistant", "w0 w1 w2 "),
        ("user", "again"),
    ]
    assert server.bodies[0]["millpond"] == {"method": "tova", "options": {"skip": "1"}}
    assert "seed" not in server.bodies[0]
    assert "Bearer secret" in server.headers[0]


def test_a_server_that_fails_now_and_then() -> None:
    with FakeServer(conduct={0: "busy", 1: "error", 2: "hang up"}).running() as server:
        done = say("1", "2", "3", "4", options=["--url", server.url, "--max-tokens", "2"])
    assert done.exit_code == 0, done.output
    told = " ".join(done.stderr.split())
    assert "429: too many" in told
    assert "out of memory" in told
    assert "cannot be reached" in told
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["1", "2", "3", "4"]
    assert done.stdout.endswith("w0 w1 \n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "cannot be reached"),
        (["--url", "http://a:x"], "cannot be reached"),
        (["--url", "http://x", "--dtype", "f32"], "leave them out with --url"),
        (["--top-p", "2"], "top_p=2"),
        (["--method", "h3o"], "did you mean 'h2o'"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], message: str) -> None:
    done = say("hello", options=options)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_without_httpx_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    done = say("hello", options=["--url", "http://x"])
    assert done.exit_code == 2
    assert "pip install httpx" in done.stderr


def test_a_session_goes_on_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path))
    options = ["--session", "mine", "--temperature", "0", "--max-tokens", "4", "--method", "full"]
    first = say(PAIRS, options=[*options, "--system", "be kind"])
    assert first.exit_code == 0, first.stderr
    assert (tmp_path / "sessions" / "mine" / "messages.json").exists()
    second = say("and now ?", "/stats", options=options)
    assert "3 messages so far" in second.stderr
    assert "tokens of the session" in second.stderr, "the cache of the first turn went on"
    refused = say("x", options=[*options, "--system", "be short"])
    assert refused.exit_code
    assert "began with another system message" in refused.stderr
    third = say("/reset", "/stats", options=options)
    assert "5 messages so far" in third.stderr
    assert "messages so far" not in say(options=[*options, "--system", "be kind"]).stderr


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 65])
def test_names_of_sessions_that_leave_their_folder_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path))
    found = say("x", options=["--session", name])
    assert found.exit_code
    assert "a name has 1 to 64 letters" in found.stderr
    assert not list(tmp_path.iterdir())


def test_a_broken_session_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path))
    home = tmp_path / "sessions" / "mine"
    home.mkdir(parents=True)
    for text in ("{", "{}", '[{"role": "root", "content": "x"}]', '[{"role": "user", "content": 1}]'):
        (home / "messages.json").write_text(text)
        found = say("x", options=["--session", "mine"])
        assert found.exit_code
        assert "remove it, or name another session" in found.stderr
