"""The language of pond-recall: every answer follows from its text, streams are fixed, training and exam are apart."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from millpond.cli.demo.task import DemoTask
from millpond.errors import OptionError
from millpond_lab.pond import facts as f
from millpond_lab.pond import words as w
from millpond_lab.pond.demo_file import FILE, demo_exam, file_text
from millpond_lab.pond.demo_file import LENGTH as DEMO_LENGTH
from millpond_lab.pond.demo_file import SEED as DEMO_SEED
from millpond_lab.pond.facts import (
    FAMILIES,
    FILLERS,
    TASKS,
    FactQuestion,
    Facts,
    Paper,
    Words,
    draw_paper,
    filler,
    hide,
    spell,
    stream,
)
from millpond_lab.pond.words import build_tokenizer

LENGTH = 400


def solve(text: list[str], question: list[str]) -> list[str]:
    """The answer, read off the text by rules written independently of the generator."""
    mark, subject = question[0], question[1:-1]
    following = {name: [b for a, b in pairwise(text) if a == name and b in w.THINGS] for name in subject}
    if mark == w.ASK:
        return following[subject[0]][-1:]
    if mark == w.ALL:
        return following[subject[0]]
    if mark == w.EACH:
        return [following[name][-1] for name in subject]
    if mark == w.TRACE:
        links = {a: b for let, a, b in zip(text, text[1:], text[2:], strict=False) if let == w.LET}
        place, places = subject[0], []
        while place in links:
            place = links[place]
            places.append(place)
        return places
    if mark == w.COPY:
        begin = next(i for i, word in enumerate(text) if word == w.OPEN and text[i + 1] == subject[0])
        return text[begin + 2 : text.index(w.CLOSE, begin)]
    group = w.ANIMALS if mark == w.MOST else w.PLANTS
    counts = {word: text.count(word) for word in group}
    if mark == w.MOST:
        return sorted(counts, key=lambda word: -counts[word])[: f.TOP]
    return sorted(sorted(counts, key=lambda word: -counts[word])[: f.COMMON_WORDS])


def words_of(paper: Paper) -> list[str]:
    return spell(paper.text).split()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seed", range(5))
def test_every_answer_can_be_read_off_its_text(task: str, seed: int) -> None:
    paper = draw_paper(task, seed, 0, LENGTH)
    for asked in paper.asked:
        question, answer = spell(asked.question).split(), spell(asked.answer).split()
        references, told = spell(asked.references).split(), solve(words_of(paper), question)
        assert answer.pop() == w.EOS
        if asked.any_order:
            assert sorted(references) == sorted(told)
            told = references
        assert references == told
        subject = question[1:-1]
        pairs = [word for pair in zip(subject, told, strict=True) for word in pair] if question[0] == w.EACH else []
        assert answer == (pairs or [*subject, *told])


def test_a_word_is_accepted_in_its_place_or_in_any_of_those_that_are_left() -> None:
    ordered = FactQuestion("copy", (7, 1, w.IS_ID), (1, 4, 5, w.EOS_ID))
    assert [ordered.accepted(place, (1, 5)) for place in range(4)] == [(1,), (4,), (5,), (w.EOS_ID,)]
    free = replace(ordered, any_order=True)
    assert [free.accepted(place, (1, 5)) for place in range(4)] == [(1,), (4,), (4,), (w.EOS_ID,)]
    assert free.accepted(1, ()) == (4, 5)


@pytest.mark.parametrize("task", TASKS)
def test_a_paper_is_as_long_as_asked_and_a_function_of_its_name(task: str) -> None:
    one, again, other = (draw_paper(task, 7, i, LENGTH, {"questions": 1}) for i in (3, 3, 4))
    asked = one.asked[0]
    assert len(one.text) + len(asked.question) + len(asked.answer) == LENGTH
    assert np.array_equal(one.text, again.text)
    assert one.asked == again.asked
    assert not np.array_equal(one.text, other.text)


def test_counted_words_have_a_clear_order() -> None:
    for count in (12, 30, 60, 90):
        facts = f.frequent(Words(stream("test", count)), count)
        told = [fact[0] for thread in facts.threads for fact in thread]
        counts = [told.count(word) for word in facts.asked[0].answer[:-1]]
        others = max((told.count(word) for word in set(told) - set(facts.asked[0].answer)), default=0)
        assert all(a >= 1.4 * b for a, b in pairwise([*counts, others]))
    for count in (12, 30, 60):
        facts = f.common(Words(stream("test", count)), count)
        told = [fact[0] for thread in facts.threads for fact in thread]
        counts = {word: told.count(word) for word in set(told)}
        chosen = facts.asked[0].answer[:-1]
        assert {counts.pop(word) for word in chosen} == {max(3, (count - 12) // 4)}
        assert all(times == 1 for times in counts.values())


def test_the_single_needle_stands_at_its_depth() -> None:
    for depth in (0.0, 0.5, 1.0):
        paper = draw_paper("niah_single", 1, 0, LENGTH, {"depth": depth})
        text = words_of(paper)
        place = next(i for i, word in enumerate(text) if word in w.NAMES)
        assert place == pytest.approx(1 + depth * (len(text) - 3), abs=1)


def test_facts_keep_their_order_and_their_number() -> None:
    facts = Facts([[(100, 200), (100, 201), (100, 202)], [(101, 203)]], [])
    text = hide(stream("order"), facts, 50).tolist()
    places = [text.index(thing) for thing in (200, 201, 202)]
    assert places == sorted(places)
    assert len(text) == 50
    assert all(text[place - 1] == 100 for place in places)


@pytest.mark.parametrize("kind", FILLERS)
def test_filler_is_filler(kind: str) -> None:
    text = filler(stream(kind), 500, kind)  # type: ignore[arg-type]
    assert text.shape == (500,)
    assert set(text.tolist()) <= set(w.ids(w.FILLER))


def test_groups_do_not_overlap() -> None:
    assert len(set(w.VOCABULARY)) == len(w.VOCABULARY) == sum(map(len, w.GROUPS))
    assert [w.VOCABULARY[i] for i in w.ids(w.TOWNS)] == list(w.TOWNS)


def test_too_many_facts_and_questions_are_refused() -> None:
    with pytest.raises(OptionError, match="length 10 must be at least"):
        hide(stream("x"), Facts([[(1, 2)] * 6], []), 10)
    with pytest.raises(OptionError, match="answers 1 to 32"):
        draw_paper("recall", 0, 0, LENGTH, {"questions": 33})
    with pytest.raises(OptionError, match="did you mean 'recall'"):
        draw_paper("recal", 0, 0, LENGTH)


def test_the_tokenizer_has_one_token_per_word() -> None:
    tokenizer = build_tokenizer(1024)
    paper = draw_paper("copy", 0, 0, LENGTH)
    assert tokenizer(spell(paper.text[1:]))["input_ids"] == paper.text.tolist()
    question = spell(paper.asked[0].question)
    assert tokenizer(" " + question, add_special_tokens=False)["input_ids"] == list(paper.asked[0].question)
    assert tokenizer.eos_token == w.EOS
    assert tokenizer("zebra", add_special_tokens=False)["input_ids"] == [w.UNK_ID]


def test_every_family_is_examined() -> None:
    asked: list[FactQuestion] = [question for task in TASKS for question in draw_paper(task, 0, 0, LENGTH).asked]
    assert {question.family for question in asked} == set(FAMILIES)


def test_the_file_of_the_demo_is_what_its_writer_makes() -> None:
    assert FILE.read_text(encoding="utf-8") == file_text(), "python -m millpond_lab.pond.demo_file writes it again"


@pytest.mark.parametrize(("length", "seed"), [(DEMO_LENGTH, DEMO_SEED), (400, 5)])
@pytest.mark.parametrize("questions", [1, 5, 32])
def test_the_demo_asks_the_first_questions_of_the_exam(length: int, seed: int, questions: int) -> None:
    """Fewer questions change neither the text nor each other."""
    task = DemoTask.draw(length, questions, seed)
    paper = draw_paper("recall", seed, 0, length + 7, {"pairs": 32, "questions": questions})
    assert task.context[0].tolist() == paper.text.tolist()
    assert task.questions.tolist() == [list(question.question) for question in paper.asked]
    assert task.answers.tolist() == [question.references[0] for question in paper.asked]
    facts = {*w.ids(w.NAMES), *w.ids(w.THINGS)}
    assert task.pairs == [i for i, word in enumerate(paper.text.tolist()) if word in facts]
    assert demo_exam(length, seed)["length"] == length == task.length - 1
