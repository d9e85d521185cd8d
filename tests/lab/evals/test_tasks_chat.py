"""Tasks that are conversations: the template's own text, facts, instructions, and other tasks as chats."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from millpond.errors import DataError, OptionError
from millpond_lab.evals.data.answer_rules import KINDS, AnswerRule, draw_rules, obedient
from millpond_lab.evals.data.chat_form import ChatForm
from millpond_lab.evals.spec import Spec
from millpond_lab.evals.task import TASKS
from tests.helpers.evals.task_help import TEMPLATE, build, chat_tokenizer, draw, total, word_tokenizer

ASK = " <end> <user> {} <end> <assistant> "


def test_messages_joined_by_the_form_are_the_templates_text() -> None:
    tokenizer = chat_tokenizer()
    form = ChatForm.of(tokenizer)
    talk = [("system", "be brief"), ("user", "hello"), ("assistant", "yes"), ("user", "why")]
    messages = [{"role": role, "content": text} for role, text in talk]
    own = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert f"{form.to_system}be brief{form.system_to_user}hello{form.user_to_assistant}yes{form.ask('why')}" == own
    short = tokenizer.apply_chat_template(messages[1:2], tokenize=False, add_generation_prompt=True)
    assert f"{form.to_user}hello{form.user_to_assistant}" == short


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('no system here') }}", "refuses such a conversation .no system here"),
        ("{% for m in messages %}{{ m['content'] | lower }}{% endfor %}", "changes what is said"),
        ("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}", "changes what is said"),
    ],
)
def test_templates_that_cannot_be_taken_apart_are_refused(template: str | None, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        draw(build("chat_facts"), chat_tokenizer(template))


def test_another_task_becomes_a_conversation() -> None:
    of = "prose_facts:length=400:questions=2"
    (plain,) = draw(Spec.parse(of).build(TASKS), word_tokenizer(), seed=3)
    (sample,) = draw(build("chat", of=of), chat_tokenizer(), seed=3)
    assert sample.context == f"<user> {plain.context} <end> <assistant> I have read the text."
    for question, before in zip(sample.questions, plain.questions, strict=True):
        asked, _, lead = before.text.strip().partition("? ")
        assert question.text == ASK.format(f"{asked}?") + lead
        assert (question.references, question.stop) == (before.references, before.stop)
    task = build("chat", of=of, system="be brief")
    assert draw(task, chat_tokenizer())[0].context.startswith("<system> be brief <end> <user> Read the text")
    assert task.score(sample.questions[0], plain.questions[0].references[0]) == 1.0


def test_text_and_question_in_one_message_are_the_templates_own() -> None:
    of = "prose_facts:length=400"
    (plain,) = draw(Spec.parse(of).build(TASKS), word_tokenizer(), seed=3)
    thinks = "{% if enable_thinking is defined and not enable_thinking %}<no thoughts> {% endif %}"
    tokenizer = chat_tokenizer(TEMPLATE.replace("<assistant> {% endif %}", f"<assistant> {thinks}{{% endif %}}"))
    (sample,) = draw(build("chat", of=of, messages=1), tokenizer, seed=3)
    asked, _, lead = plain.questions[0].text.partition("? ")
    said = [{"role": "user", "content": f"{plain.context}{asked}?"}]
    whole = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert sample.context + sample.questions[0].text == f"{whole}{lead}"
    assert sample.questions[0].text.endswith(f"<assistant> <no thoughts> {lead}")
    assert sample.context == f"<user> {plain.context}"
    with pytest.raises(OptionError, match="writes before it asks"):
        draw(build("chat", of="stated_facts:length=400", messages=1), tokenizer)
    with pytest.raises(OptionError, match="messages=3"):
        build("chat", of=of, messages=3)


def test_what_the_assistant_writes_is_its_own_message() -> None:
    (sample,) = draw(build("chat", of="stated_facts:length=400"), chat_tokenizer())
    assert sample.context.endswith("<end> <assistant> ")
    assert sample.questions[0].references[0] in sample.written


@pytest.mark.parametrize(
    ("of", "message"), [("chat", "names a chat"), ("piqa", "scored by choice"), ("prose", "unknown task 'prose'")]
)
def test_what_cannot_become_a_conversation_is_refused(of: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build("chat", of=of)


@pytest.mark.parametrize("messages", [1, 3])
def test_facts_stand_in_the_conversation_once_and_in_no_question(messages: int) -> None:
    task = build("chat_facts", length=900, facts=5, questions=5, messages=messages)
    kinds = set()
    for sample in draw(task, chat_tokenizer(), 3):
        assert 850 <= total(chat_tokenizer(), sample) <= 900
        assert sample.context.count("<user>") == messages
        assert sample.context.endswith("<assistant> I have read it.")
        kinds |= set(sample.facts["kind"])
        for question in sample.questions:
            (states,) = question.references
            assert sample.context.count(states) == 1
            assert states not in question.text
            assert task.score(question, f"Surely\n {states.upper()}.") == 1.0
            assert task.score(question, states[:-1]) == task.score(question, "") == 0.0
        (hidden,) = re.findall(r"<system> .*answer: (\w+)\. <end>", sample.context)
        assert any(question.references == (hidden,) for question in sample.questions)
    assert len(kinds) == 5


def test_answers_about_facts_can_be_begun_and_texts_named(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(" ".join(f"word{n}x{i}" for i in range(40)) for n in range(9)))
    (sample,) = draw(build("chat_facts", length=600, begun=True, essay=str(book)), chat_tokenizer())
    assert "word3x7 word3x8" in sample.context
    assert all(not question.text.endswith("<assistant> ") for question in sample.questions)
    book.write_text("too short")
    with pytest.raises(DataError, match="no paragraph of 20 to 200 words"):
        draw(build("chat_facts", essay=str(book)), chat_tokenizer())


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_is_obeyed_by_what_obeys_it_alone(kind: str) -> None:
    rule = AnswerRule(kind, {"items": "three"}.get(kind, "Heron"))  # type: ignore[arg-type]
    right = {
        "begin": "heron, of course",
        "end": "It is the Heron.",
        "name": "a HERON stands",
        "capitals": "IT IS 3.",
        "items": "one; two; three",
        "brackets": " [It is].",
    }
    assert rule.obeyed(right[kind])
    wrong = {
        "begin": "A heron",
        "end": "Heron it is",
        "name": "herons stand",
        "capitals": "It IS",
        "items": "one; two; three; four",
        "brackets": "[It] is",
    }
    assert not rule.obeyed(wrong[kind])
    assert not rule.obeyed("")
    assert not rule.obeyed(" [;;;] ")


def test_all_rules_can_be_obeyed_at_once() -> None:
    rules = draw_rules(random.Random(5), KINDS)
    answer = obedient(rules, ("fox", "deer", "owl", "hare"))
    assert all(rule.obeyed(answer) for rule in rules)
    assert len({rule.word for rule in rules if rule.word}) == 4


def test_instructions_are_scored_by_the_share_that_is_obeyed() -> None:
    task = build("instructions", length=500, rules=6, questions=3, examples=2)
    (sample,) = draw(task, chat_tokenizer())
    assert 470 <= total(chat_tokenizer(), sample) <= 500
    assert sample.context.startswith("<system> ")
    assert sample.context.count("Rule: ") == 6
    assert sample.context.count("you answer: ") == 2
    for question in sample.questions:
        assert question.text.startswith(" <end> <user> ")
        assert task.score(question, question.references[0]) == 1.0
        broken = question.references[0].replace("]", "")
        assert task.score(question, broken) == pytest.approx(5 / 6)
        assert task.score(question, "") == 0.0


def test_a_score_of_nothing_obeyed_is_nothing() -> None:
    task = build("instructions", length=500, rules=2)
    question = draw(task, chat_tokenizer())[0].questions[0]
    assert task.score(question, "i do not know what you want from me") == 0.0
