"""`millpond remember` reads a text once; `millpond ask` answers from the file."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from helpers.models import needs_pond_text
from millpond.cli import console
from millpond.cli.demo.task import DemoTask
from millpond.hf.ask import beginning, ending
from millpond.hf.document import document_note
from millpond.models.chat_template import turn_ends
from millpond.models.load import load_tokenizer, resolve
from tests.cli.test_cli import right, wrong


@pytest.fixture(scope="module")
def task() -> DemoTask:
    return DemoTask.draw(400, 3, seed=5)


def words(ids: list[int]) -> str:
    text = load_tokenizer("pond-recall").decode(ids)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_one_text_and_many_questions(task: DemoTask, codec: str, tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", str(tmp_path / "text.kv")
    text.write_text(words(task.context[0, 1:].tolist()), encoding="utf-8")  # the tokenizer begins texts itself
    done = right("remember", file, "--prompt-file", str(text), "--budget", "40%", "--codec", codec)
    assert f"{task.length} tokens read" in done.stderr
    questions = [words(question.tolist()) for question in task.questions]
    asked = right("ask", file, *questions, "--max-new-tokens", "4").stdout.splitlines()
    assert asked[0::2] == questions
    for answer, thing in zip(asked[1::2], task.answers.tolist(), strict=True):
        assert words([thing]) in answer.split()


def test_errors(tmp_path: Path) -> None:
    assert "cannot be read" in wrong("ask", str(tmp_path / "none.kv"), "what?")
    (tmp_path / "other").write_text("no tensors")
    assert "cannot be read" in wrong("ask", str(tmp_path / "other"), "what?")
    assert "remembers predictions" in wrong(
        "remember", str(tmp_path / "x.kv"), "--prompt", "go on " * 50, "--method", "sirllm"
    )


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`pond-recall` with a template that says who speaks, and a special token, `<is>`, that ends a turn."""
    folder = tmp_path_factory.mktemp("chatty")
    shutil.copytree(resolve("pond-recall"), folder, dirs_exist_ok=True)
    tokenizer = load_tokenizer("pond-recall")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<is>"]})
    tokenizer.chat_template = (
        "<bos>{% for m in messages %}{{ 'say ' + m['content'] if m['role'] == 'user' else ' ' + m['content'] }}<is>"
        "{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_question_ends_the_message_that_the_text_began(chatty: str) -> None:
    tokenizer = load_tokenizer(chatty)
    both = torch.cat([beginning(tokenizer, "old stone", True), ending(tokenizer, "on river", True)], 1)[0]
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "old stone\n\non river"}])["input_ids"]
    assert both.tolist() == list(whole)
    apart = torch.cat([beginning(tokenizer, "old stone", False), ending(tokenizer, "on river", False)], 1)[0]
    assert apart.tolist() == tokenizer("old stone on river")["input_ids"]
    assert turn_ends(tokenizer) == [tokenizer.convert_tokens_to_ids("<is>")]
    assert turn_ends(load_tokenizer("pond-recall")) == []


def test_a_template_is_used_where_there_is_one(chatty: str, tmp_path: Path) -> None:
    text, in_chat, apart = "anna kettle " + "go on and off past stone " * 20, str(tmp_path / "a"), str(tmp_path / "b")
    right("remember", in_chat, "--prompt", text, "--model", chatty, "--budget", "64")
    right("remember", apart, "--prompt", text, "--model", chatty, "--budget", "64", "--no-chat")
    notes = [json.loads(document_note(file)) for file in (in_chat, apart)]
    assert [note["chat"] for note in notes] == [True, False]
    n = {file: safe_open(file, "pt").get_tensor("ids").shape[1] for file in (in_chat, apart)}
    assert n[in_chat] == n[apart] + 1  # "say"
    answer = right("ask", in_chat, "<ask> anna", "--max-new-tokens", "8").stdout.splitlines()
    assert answer[0] == "<ask> anna"
    assert len(answer) == 2


@needs_pond_text
def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    file = str(tmp_path / "a")
    assert "no chat template" in wrong("remember", file, "--prompt", "x", "--model", "pond-text", "--chat")


def test_a_preset_in_one_word(tmp_path: Path) -> None:
    file, text = str(tmp_path / "text.kv"), "go on and off past stone " * 40
    right("remember", file, "--prompt", text, "--preset", "tiny")
    with safe_open(file, "pt") as found:
        settings = json.loads(found.metadata()["settings"])
    assert (settings["method"], settings["codec"]) == ("ada", "rotated4")
    assert "decides the method too" in wrong("remember", file, "--prompt", text, "--preset", "tiny", "--method", "h2o")


def test_long_work_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nobody looks at a terminal, a line at once, and more as time goes."""
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.01)
    with console.working("reading 5 tokens"):
        assert capsys.readouterr().err == "reading 5 tokens ...\n"
        time.sleep(0.1)
    assert capsys.readouterr().err.count("reading 5 tokens: 0 s\n") >= 2
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
