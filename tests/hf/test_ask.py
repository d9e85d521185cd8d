"""Questions about a text in Python: as on the command line, and as `generate` answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.cli.demo.task import DemoTask
from millpond.errors import BudgetError, OptionError
from millpond.hf.ask import beginning, ending
from tests.cli.test_cli import right
from tests.cli.test_document import chatty as chatty  # the fixture
from tests.cli.test_document import words

NEW = 4


@pytest.fixture(scope="module")
def model() -> Any:
    return mp.load_model("pond-recall")


@pytest.fixture(scope="module")
def task() -> DemoTask:
    return DemoTask.draw(400, 3, seed=5)


@pytest.fixture(scope="module")
def text(task: DemoTask) -> str:
    return words(task.context[0, 1:].tolist())  # the tokenizer begins texts itself


@pytest.fixture(scope="module")
def questions(task: DemoTask) -> list[str]:
    return [words(question.tolist()) for question in task.questions]


def test_it_answers_and_says_what_was_held(model: Any, task: DemoTask, text: str, questions: list[str]) -> None:
    answers = mp.ask(model, text, questions, method="kvzip", budget="40%", max_new_tokens=NEW)
    for answer, question, thing in zip(answers, questions, task.answers.tolist(), strict=True):
        assert (answer.question, str(answer)) == (question, answer.text)
        assert words([thing]) in answer.text.split()
        assert len(answer.token_ids) <= NEW
        assert answer.held.seen == [task.length], "before the question"
        assert 0.35 < answer.share < 0.55
    assert mp.ask(model, text, questions[1], method="kvzip", budget="40%", max_new_tokens=NEW) == answers[1]
    assert "millpond" not in model.config._attn_implementation, "the model has its own attention again"


@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_it_is_what_the_command_line_answers(text: str, questions: list[str], codec: str, tmp_path: Path) -> None:
    source, file = tmp_path / "text.txt", str(tmp_path / "text.kv")
    source.write_text(text, encoding="utf-8")
    right("remember", file, "--prompt-file", str(source), "--method", "keydiff", "--budget", "30%", "--codec", codec)
    shown = right("ask", file, *questions, "--max-new-tokens", str(NEW)).stdout.splitlines()
    answers = mp.ask("pond-recall", text, questions, method="keydiff", budget="30%", codec=codec, max_new_tokens=NEW)
    assert [line.strip() for line in shown[1::2]] == [answer.text for answer in answers]


def test_by_default_nothing_is_evicted(model: Any, text: str, questions: list[str]) -> None:
    answer = mp.ask(model, text, questions[0], max_new_tokens=NEW)
    assert answer.held.evicted == 0
    assert set(answer.held.layer_formats) == {"int8"}


def test_in_a_chat_text_and_question_are_one_message(chatty: str, text: str) -> None:
    model, tokenizer = mp.load_model(chatty), mp.load_tokenizer(chatty)
    ids = torch.cat([beginning(tokenizer, text, True), ending(tokenizer, "<ask> anna", True)], 1)
    ends = [model.generation_config.eos_token_id, tokenizer.convert_tokens_to_ids("<is>")]
    stock = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=ends
    )
    found = mp.ask(model, text, "<ask> anna", method="full", codec="auto", max_new_tokens=8)
    assert list(found.token_ids) == stock[0, ids.shape[1] :].tolist()
    bare = mp.ask(model, text, "<ask> anna", method="full", codec="auto", max_new_tokens=8, chat=False)
    assert bare.held.seen == [found.held.seen[0] - 1], "without the word that begins the message"


def test_what_cannot_be_is_refused(model: Any) -> None:
    for given in ({"text": " "}, {"question": ""}, {"question": ["what?", ""]}, {"max_new_tokens": 0}, {"chunk": 0}):
        with pytest.raises(OptionError, match=r"empty|at least 1"):
            mp.ask(model, **{"text": "old stone", "question": "what?"} | given)
    tokenizer = mp.load_tokenizer("pond-recall")
    tokenizer.chat_template = None
    with pytest.raises(OptionError, match="no chat template"):
        mp.ask(model, "old stone", "what?", chat=True, tokenizer=tokenizer)
    with pytest.raises(BudgetError, match="budget"):
        mp.ask(model, "old stone", "what?", method="h2o", budget="lots")
    nameless = mp.load_model("pond-recall")
    nameless.name_or_path = nameless.config._name_or_path = ""
    with pytest.raises(OptionError, match="tokenizer="):
        mp.ask(nameless, "old stone", "what?")
