"""Tasks whose samples are made: their lengths, their needles, their streams."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.errors import DataError, OptionError
from millpond_lab.evals.data import pond_tasks
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.pond.english_facts import FORMS
from tests.helpers.evals.task_help import build, count, draw, gpt2, total, word_tokenizer, write_rows

FAMILIES: dict[str, dict[str, Any]] = {
    "niah_single": {},
    "niah_single 2": {"variant": 2},
    "niah_single 3": {"variant": 3},
    "niah_multikey": {"questions": 3},
    "niah_multikey 2": {"variant": 2},
    "niah_multikey 3": {"variant": 3},
    "niah_multivalue": {},
    "niah_multivalue questions": {"values": 2, "questions": 3},
    "niah_multiquery": {},
    "niah_multiquery questions": {"queries": 2, "questions": 3},
    "tracking": {"chains": 2},
    "tracking questions": {"chains": 3, "questions": 2},
    "common_words": {},
    "frequent_words": {},
    "recall": {"questions": 4},
    "overwritten": {"questions": 2},
    "copy": {},
    "copy questions": {"questions": 3},
    "code": {"questions": 4},
    "prose_facts": {"questions": 3},
    "prose_facts phrase": {"answer": "phrase", "questions": 2},
    "pond_facts": {"questions": 3},
    "pond_facts word": {"answer": "word", "questions": 2},
}
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def english(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pond_tasks, "speaks_pond", lambda tokenizer: False)


def of(family: str, **more: Any) -> Any:
    return build(family.split()[0], **{**FAMILIES[family], **more})


@each_family
def test_a_prompt_fills_its_length_and_never_passes_it(family: str) -> None:
    # one word more or less: a UUID has 9 parts, a key in a needle 3
    slack = 12 if "3" in family else 6
    for length in (1024, 2048):
        for sample in draw(of(family, length=length), word_tokenizer(), 2):
            assert length - slack <= total(word_tokenizer(), sample) <= length
            assert sample.facts["length"] == length


@each_family
def test_the_length_holds_for_a_real_tokenizer(family: str) -> None:
    (sample,) = draw(of(family, length=3000), gpt2())
    assert 3000 - (32 if "3" in family else 10) <= total(gpt2(), sample) <= 3000
    for question in sample.questions:
        assert count(gpt2(), " ".join(question.references)) < question.max_new_tokens


@each_family
def test_a_sample_depends_on_seed_and_place_alone(family: str) -> None:
    task = of(family, length=1024)
    three = draw(task, word_tokenizer(), 3)
    assert draw(of(family, length=1024), word_tokenizer(), 2) == three[:2]
    assert len({sample.context for sample in three}) == len({sample.id for sample in three}) == 3
    (other,) = draw(task, word_tokenizer(), 1, seed=1)
    assert other.context != three[0].context
    assert other.questions != three[0].questions


@each_family
def test_every_reference_is_in_the_context_and_in_no_question(family: str) -> None:
    (sample,) = draw(of(family, length=1024), word_tokenizer())
    assert len(sample.questions) == FAMILIES[family].get("questions", 1)
    for question in sample.questions:
        assert question.references
        for reference in question.references:
            assert re.search(rf"\b{re.escape(reference)}\b", sample.context)
            assert reference not in question.text


@each_family
def test_a_perfect_answer_scores_one_and_an_empty_one_nothing(family: str) -> None:
    task = of(family, length=1024)
    for question in draw(task, word_tokenizer())[0].questions:
        assert task.score(question, " ".join(question.references)) == 1.0
        assert task.score(question, f"It is: {', '.join(question.references)}.") > 0.8
        assert task.score(question, "") == task.score(question, "nothing like it") == 0.0


@each_family
def test_facts_that_do_not_fit_are_refused(family: str) -> None:
    with pytest.raises(OptionError, match=r"length is 32; raise length, or hide less|length=32"):
        draw(of(family, length=32), word_tokenizer())


@pytest.mark.parametrize("essay", [False, True])
def test_the_grid_has_its_needle_at_the_asked_depth(essay: bool, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("One day it rained. The mill stood still! Did anybody ask why? Nobody did.\n\nThe end")
    task = build("needle", lengths="600+1200", depths=5, essay=str(book) if essay else "")
    samples = draw(task, word_tokenizer(), 11)
    seen = [(sample.facts["length"], sample.facts["depth"]) for sample in samples]
    assert seen[:10] == [(length, depth) for length in (600, 1200) for depth in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert seen[10] == seen[0]
    for sample in samples:
        (needle,) = re.findall(r"The number to remember is that of the \S+: \d+\.", sample.context)
        before = sample.context.index(needle) / (len(sample.context) - len(needle))
        assert before == pytest.approx(sample.facts["depth"], abs=0.03)
        assert sample.questions[0].references[0] in needle
        assert ("mill stood still" in sample.context) == essay


def test_needles_of_one_text_lie_where_their_facts_say() -> None:
    for sample in draw(build("niah_single", length=4000, variant=2), word_tokenizer(), 5):
        place = sample.context.index(sample.questions[0].references[0]) / len(sample.context)
        assert place == pytest.approx(sample.facts["depth"], abs=0.03)


def test_the_last_value_of_an_overwritten_key_is_the_reference() -> None:
    task = build("overwritten", length=1500, pairs=5, times=3, questions=5)
    (sample,) = draw(task, word_tokenizer())
    for question in sample.questions:
        key = re.findall(r"code word of (\S+) is$", question.text)[0]
        values = re.findall(rf"The code word of {key} is (\w+)\.", sample.context)
        assert len(values) == 3
        assert question.references == (values[-1],)


def test_a_chain_of_variables_runs_through_the_text_in_order() -> None:
    (sample,) = draw(build("tracking", length=1200, chains=3, hops=4), word_tokenizer())
    held: dict[str, str] = {}
    for name, value in re.findall(r"VAR (\w+) = (\w+)\.", sample.context):
        held[name] = held.get(value, value)
    wanted = re.findall(r"hold the value (\d+)", sample.questions[0].text)[0]
    assert len(held) == 15
    assert {name for name, value in held.items() if value == wanted} == {*sample.questions[0].references}


def test_common_and_frequent_words_are_what_a_count_says() -> None:
    (sample,) = draw(build("common_words", length=1000), word_tokenizer())
    counts = Counter(re.findall(r"\d+\. (\w+)", sample.context))
    assert {word for word, n in counts.items() if n == 6} == {*sample.questions[0].references}
    assert set(counts.values()) == {6, 1}
    (sample,) = draw(build("frequent_words", length=1000), word_tokenizer())
    ranked = Counter(sample.context.split("\n\n")[1].split()).most_common(4)
    assert tuple(word for word, _ in ranked[:3]) == sample.questions[0].references
    assert ranked[2][1] > ranked[3][1]


def test_a_marked_passage_is_the_reference_of_copying() -> None:
    task = build("copy", length=600, passages=3, words=20)
    (sample,) = draw(task, word_tokenizer())
    passages = dict(re.findall(r"\[\[ (\S+): (.+?) \]\]", sample.context))
    name = re.findall(r"passage named (\S+)", sample.questions[0].text)[0]
    assert len(passages) == 3
    assert (passages[name],) == sample.questions[0].references
    words = passages[name].split()
    assert len(words) == 20
    assert task.score(sample.questions[0], " ".join(words[:10])) == 0.5


def test_multikey_fills_with_needles_of_other_keys() -> None:
    (sample,) = draw(build("niah_multikey", length=2000, variant=2), word_tokenizer())
    keys = re.findall(r"The secret number of (\S+) is \d{7}\.", sample.context)
    assert len(keys) == len({*keys}) > 100
    asked = re.findall(r"secret number of (\S+) in", sample.questions[0].text)[0]
    assert keys.count(asked) == 1


def test_wrong_options_say_what_is_right() -> None:
    for name, options, message in (
        ("niah_single", {"variant": 4}, "variant=4 must be 1 to 3"),
        ("niah_single", {"variant": 1, "essay": "x.txt"}, "repeats a few sentences"),
        ("niah_multikey", {"variant": 2, "essay": "x.txt"}, "with an essay: variant=2"),
        ("niah_multikey", {"questions": 5}, "questions=5 is more than keys=4"),
        ("recall", {"pairs": 0}, "pairs=0 must be 1 to 16,777,216"),
        ("overwritten", {"times": 1}, "times=1 must be at least 2"),
        ("common_words", {"often": 2, "seldom": 2}, "seldom=2 must be below often=2"),
        ("frequent_words", {"alpha": 0.0}, "must be above 0"),
        ("needle", {"lengths": "1k"}, r"lengths='1k' must be whole numbers"),
        ("needle", {"depths": 1}, "depths=1 must be at least 2"),
        ("prose_facts", {"answer": "name"}, "answer='name' must be one of 'number', 'phrase'"),
        ("prose_facts", {"facts": 9}, "facts=9 must be at most 8"),
        ("prose_facts", {"questions": 5}, "questions=5 is more than facts=4"),
        ("pond_facts", {"questions": 7}, "questions=7 is more than facts=6"),
        ("pond_facts", {"facts": 500}, "facts=500 must be at most"),
    ):
        with pytest.raises(OptionError, match=message):
            build(name, **options)


def test_a_list_that_runs_out_of_words_is_refused() -> None:
    with pytest.raises(OptionError, match="lower length"):
        draw(build("common_words", length=150_000, often=2, seldom=1), word_tokenizer())


def test_a_broken_essay_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    with pytest.raises(DataError, match=r"empty\.txt holds no text"):
        draw(build("recall", essay=str(empty)), word_tokenizer())
    with pytest.raises(DataError, match=r"nowhere\.txt cannot be read"):
        draw(build("recall", essay=str(tmp_path / "nowhere.txt")), word_tokenizer())


@pytest.mark.parametrize(("answer", "value"), [("number", r"\d{7}"), ("phrase", r"the \w+ \w+ and the \w+ \w+")])
def test_facts_stand_in_prose_and_each_question_names_its_own(answer: str, value: str, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a mild evening. Nobody came to the pond! Was it so late? It was.")
    (sample,) = draw(
        build("prose_facts", answer=answer, facts=3, questions=3, length=600, essay=str(book)), word_tokenizer()
    )
    told = dict(re.findall(rf"The ([a-z ]+) is ({value})\.", sample.context))
    assert len(told) == 3
    assert sample.context.count("Nobody came to the pond!") > 3
    for question in sample.questions:
        what = re.fullmatch(r"\n\nWhat is the (.+)\? The \1 is", question.text)
        assert what
        assert question.references == (told[what[1]],)
        assert "." in question.stop  # an answer ends with its sentence, so that a later turn goes on behind it
    places = [sample.context.index(question.references[0]) / len(sample.context) for question in sample.questions]
    assert places == pytest.approx(sample.facts["depth"], abs=0.06)


def test_facts_of_prose_stand_in_the_beginning_where_that_is_wanted() -> None:
    (whole,), (early,) = (
        draw(build("prose_facts", facts=3, questions=3, length=1000, **more), word_tokenizer())
        for more in ({}, {"within": 0.2})
    )
    assert [q.references for q in early.questions] == [q.references for q in whole.questions]
    assert early.facts["depth"] == pytest.approx([0.2 * depth for depth in whole.facts["depth"]], abs=0.001)
    ends = [early.context.index(q.references[0]) / len(early.context) for q in early.questions]
    assert 0 < max(ends) < 0.3 < max(whole.facts["depth"])


def test_the_answers_of_prose_have_five_to_nine_tokens_and_are_wanted_whole() -> None:
    for answer in ("number", "phrase"):
        task = build("prose_facts", answer=answer, facts=8, questions=8, length=600)
        for sample in draw(task, word_tokenizer(), 3):
            for question in sample.questions:
                (value,) = question.references
                assert len(value if answer == "number" else value.split()) == 7
                assert task.score(question, f" {value[:-1]}") == 0.0


def test_facts_of_the_text_models_are_asked_as_they_were_trained(tmp_path: Path) -> None:
    kinds = [sample.questions for sample in draw(build("pond_facts"), word_tokenizer(), FORMS)]
    assert len({re.split(" (?:of|does|has|for) ", questions[0].text)[0] for questions in kinds}) >= 4
    for answer, value in (("number", r"\d{3,5}"), ("word", r"[a-z]+")):
        for sample in draw(build("pond_facts", answer=answer, questions=6), word_tokenizer(), 3):
            references = [reference for question in sample.questions for reference in question.references]
            assert len(set(references)) == 6
            assert all(re.fullmatch(value, reference) for reference in references)
            assert all(question.text.startswith((" What ", " At which ")) for question in sample.questions)


SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "The mill was built in 1612 by Anna.",
                    "qas": [
                        {"question": "When was the mill built?", "answers": [{"text": "1612"}, {"text": "in 1612"}]},
                        {"id": "b", "question": "Who sold it?", "answers": [], "is_impossible": True},
                    ],
                },
                {
                    "context": "The pond is four metres deep.",
                    "qas": [{"id": "c", "question": "How deep is the pond?", "answers": [{"text": "four metres"}]}],
                },
            ]
        }
    ]
}
HOTPOT = [
    {
        "question": "Who?",
        "answer": "Anna",
        "context": [["Mill", ["Anna built it.", "It stands."]], ["Pond", ["It lies."]]],
    },
    {"question": "What?", "answer": "a wheel", "context": [["Wheel", ["A wheel turns."]]]},
]


@pytest.mark.parametrize("rows", [[SQUAD], HOTPOT], ids=["squad", "hotpot"])
def test_questions_have_their_documents_among_those_of_others(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    task = build("qa", path=write_rows(tmp_path / "qa.jsonl", rows), length=500)
    samples = draw(task, word_tokenizer(), 4)
    assert {q.text for s in samples for q in s.questions} >= {"\n\nQuestion: " + t + "\nAnswer:" for t in _asked(rows)}
    for sample in samples:
        (question,) = sample.questions
        assert 480 <= total(word_tokenizer(), sample) <= 500
        assert question.references[0].lower() in sample.context.lower()
        assert task.score(question, f"{question.references[-1]}.") == 1.0
        assert task.score(question, "") == 0.0


def _asked(rows: list[dict[str, Any]]) -> list[str]:
    return ["When was the mill built?", "How deep is the pond?"] if "data" in rows[0] else ["Who?", "What?"]


def test_broken_questions_are_named(tmp_path: Path) -> None:
    for name, rows, message in (
        ("one", HOTPOT[1:], "documents of one question only"),
        ("none", [{"answer": "x", "context": "y"}], "row 1: field 'question' is missing"),
        ("empty", [{"data": []}], "field 'data' must be a list of at least one object"),
    ):
        path = write_rows(tmp_path / f"{name}.jsonl", rows)
        with pytest.raises(DataError, match=message):
            draw(build("qa", path=path), word_tokenizer())


class TestPond:
    """Where the model speaks its own language, that language's samples are asked for."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def samples(family: str, count: int, seed: int, **knobs: Any) -> Iterator[Sample]:
            calls.append({"family": family, "count": count, "seed": seed, **knobs})
            return iter([Sample("x", "context", (Question(" q", ("kite",)),))] * count)

        monkeypatch.setattr(pond_tasks, "speaks_pond", lambda tokenizer: True)
        monkeypatch.setattr(pond_tasks, "pond_samples", samples)
        return calls

    def test_options_that_it_has_are_handed_on(self, asked: list[dict[str, Any]]) -> None:
        assert len(draw(build("recall", length=512, pairs=9), word_tokenizer(), 3, seed=7)) == 3
        draw(build("tracking", length=512), word_tokenizer())
        assert asked == [
            {"family": "recall", "count": 3, "seed": 7, "length": 512, "pairs": 9, "questions": 1},
            {"family": "tracking", "count": 1, "seed": 0, "length": 512, "hops": 4},
        ]

    def test_the_grid_is_drawn_point_by_point(self, asked: list[dict[str, Any]]) -> None:
        samples = draw(build("needle", lengths="256+512", depths=2), word_tokenizer(), 4)
        points = [(256, 0.0), (256, 1.0), (512, 0.0), (512, 1.0)]
        assert [(call["length"], call["depth"]) for call in asked] == points
        assert [(sample.facts["length"], sample.facts["depth"]) for sample in samples] == points
        assert len({call["seed"] for call in asked}) == len({sample.id for sample in samples}) == 4

    def test_options_for_english_are_refused(self, asked: list[dict[str, Any]]) -> None:
        for name, options in (
            ("recall", {"essay": "x"}),
            ("overwritten", {"times": 3}),
            ("niah_single", {"variant": 3}),
        ):
            with pytest.raises(OptionError, match="is for English text"):
                draw(build(name, **options), word_tokenizer())
        with pytest.raises(OptionError, match="none of the words of a file"):
            draw(build("piqa"), word_tokenizer())
        with pytest.raises(OptionError, match="prose_facts: pond-recall knows none of its words"):
            draw(build("prose_facts"), word_tokenizer())
        with pytest.raises(OptionError, match="pond_facts: pond-recall knows none of its words"):
            draw(build("pond_facts"), word_tokenizer())
        assert asked == []


@pytest.mark.parametrize("family", ["niah_single 2", "niah_multikey", "niah_multivalue", "niah_multiquery"])
def test_numbers_of_needles_have_the_digits_that_are_asked_for(family: str) -> None:
    for digits in (3, 9):
        (sample,) = draw(of(family, length=512, digits=digits), word_tokenizer())
        for question in sample.questions:
            assert {len(value) for value in question.references} == {digits}
            assert all(value in sample.context for value in question.references)
    with pytest.raises(OptionError, match="digits=0 must be 1 to 16,777,216"):
        of(family, digits=0)


def test_identifiers_have_no_digits_to_choose() -> None:
    with pytest.raises(OptionError, match="niah_single: digits=3 is for numbers, and variant 3 hides identifiers"):
        build("niah_single", variant=3, digits=3)
