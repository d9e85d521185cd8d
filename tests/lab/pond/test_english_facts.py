"""Facts of `pond-text`: halves of the names, for training networks and for asking, share no name and no answer."""

from __future__ import annotations

import random

import pytest

from millpond_lab.pond.english_facts import MOST_FACTS, Fact, Half, draw_facts


def drawn(half: Half | None) -> list[Fact]:
    """Many facts of all forms."""
    return [fact for seed in range(400) for fact in draw_facts(random.Random(seed), 8, half=half)]


def last_words(facts: list[Fact]) -> set[str]:
    """The last names and things that facts are about, and the words that answer."""
    people = [fact.told.split(" has hidden ")[0] for fact in facts if " has hidden " in fact.told]
    people += [fact.told.split(" lives at ")[0] for fact in facts if " lives at " in fact.told]
    return {name.split()[-1] for name in people} | {fact.answer.strip(" .") for fact in facts if not fact.is_number}


def test_the_halves_share_no_name_and_no_answer_and_are_all_together() -> None:
    learned, asked, both = (last_words(drawn(half)) for half in ("learned", "asked", None))
    assert min(len(learned), len(asked)) > 80
    assert not learned & asked
    assert learned | asked == both


def test_all_words_are_drawn_as_the_models_were_trained() -> None:
    facts = draw_facts(random.Random(7), 2, form=3)
    assert [fact.told for fact in facts] == [
        "The favourite word of Anton Waters is hammer.",
        "The favourite word of Bertha Tailor is coat.",
    ]


@pytest.mark.parametrize("half", ["learned", "asked"])
def test_a_half_has_answers_for_as_many_facts_as_it_says(half: Half) -> None:
    facts = draw_facts(random.Random(0), MOST_FACTS, form=4, half=half)
    assert len({fact.answer for fact in facts}) == MOST_FACTS
