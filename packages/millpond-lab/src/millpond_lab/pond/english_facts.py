"""Recall in English: facts hidden in running text, and the questions about them, as `pond-text` was trained on.

Everything is drawn from a stream that the caller names. This module knows no tokenizer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FIRST = _words("""
Ada Agnes Albert Alice Amos Anton Basil Beatrice Bertha Boris Carl Clara Conrad Cora Daisy Daniel Dora Edgar Edith
Elias Ellen Esther Felix Flora Frank Fred George Gerda Grace Greta Harold Hector Helga Henry Hugo Ida Igor Irene Ivan
Jacob Jane Jasper John Julia Karl Kate Laura Leo Lewis Lily Lucas Mabel Mark Martha Max Mina Morris Nancy Nina Noah
Olga Oscar Otto Paul Peter Ralph Rosa Ruth Samuel Sarah Simon Sophie Stella Thomas Ursula Victor Walter Wanda
""")
_LAST = _words("""
Archer Baker Barlow Bishop Bloom Brand Brook Carter Cole Cook Cross Dale Dean Drake Field Fisher Flint Forest Fox
Frost Gale Glover Grant Gray Hale Hardy Hart Hill Holt Hunt Kemp King Knight Lamb Lane Long Marsh Mason Mills Moor
North Page Park Pike Poole Porter Price Reed Rivers Rose Savage Sharp Short Snow Steele Stone Swift Tailor Wade Ward
Waters Webb West White Wood York Young
""")
_THINGS = _words("""
anchor apple arrow basket bell blanket book bottle box bread bridge brush button candle carpet chain chair clock cloud
coat coin corn crown cup desk dog door dress drum eagle engine feather fence fire fish flag flower garden glass glove
gold hammer hat horse house iron island jacket key king kitchen knife ladder lake lamp leather letter lion map market
milk mirror money moon mountain needle oil orange paper pearl pen picture pipe plate queen rabbit ring river road roof
rope salt saddle sheep ship shoe silver snow soap star stone sugar sword table tea tent tiger tower tree valley wagon
water wheel whip window wine wolf wool
""")
#: Statement and question of a fact: (fact, question, the words before the answer, whether the answer is a number).
_FORMS = (
    ("The code of {key} is {value}.", "What is the code of {key}?", "It is", True),
    (
        "The secret number of {key} is {value}.",
        "What is the secret number of {key}?",
        "The secret number of {key} is",
        True,
    ),
    ("{key} lives at number {value}.", "At which number does {key} live?", "{key} lives at number", True),
    ("The favourite word of {key} is {value}.", "What is the favourite word of {key}?", "It is", False),
    ("{key} has hidden the {value}.", "What has {key} hidden?", "{key} has hidden the", False),
    ("The gift for {key} is a {value}.", "What is the gift for {key}?", "The gift for {key} is a", False),
)
FORMS = len(_FORMS)
#: Those with a number for an answer, and those with a word.
NUMBER_FORMS = tuple(i for i, (*_, is_number) in enumerate(_FORMS) if is_number)
WORD_FORMS = tuple(i for i, (*_, is_number) in enumerate(_FORMS) if not is_number)
#: Most different facts of one text in a half of the words: as many as there are words for answers.
MOST_FACTS = len(_THINGS) // 2

#: Half of the last names and things: learned, for texts that networks on the frozen model learn from; asked, for what
#: is asked of them afterwards. No name and no word for an answer is in both.
Half = Literal["learned", "asked"]


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence to hide, the question about it, up to the answer, and the answer."""

    told: str
    question: str
    answer: str
    is_number: bool


def draw_facts(rng: random.Random, count: int, form: int | None = None, half: Half | None = None) -> list[Fact]:
    """`count` facts of one form about different people or things, with different answers.

    Args:
        rng: where the draws come from.
        count: how many, at most the number of things that can be an answer (in a half, of those in it).
        form: which of the `FORMS`; None draws it.
        half: of the last names and things; None draws among all, as the models' own training did.
    """
    told, question, lead, is_number = _FORMS[rng.randrange(FORMS) if form is None else form]
    if is_number:
        figures = rng.choice((3, 4, 5))
        values = [str(v) for v in rng.sample(range(10 ** (figures - 1), 10**figures), count)]
    else:
        values = rng.sample(_half_of(_THINGS, half), count)
    facts = []
    for key, value in zip(_keys(rng, count, half), values, strict=True):
        asked = f"{question} {lead}".format(key=key)
        facts.append(Fact(told.format(key=key, value=value), asked, f" {value}.", is_number))
    return facts


def _half_of(words: tuple[str, ...], half: Half | None) -> tuple[str, ...]:
    """Every other word, or all."""
    return words if half is None else words[half == "asked" :: 2]


def _keys(rng: random.Random, count: int, half: Half | None) -> list[str]:
    """Different names: of people, or of things with a first name to them."""
    people = rng.random() < 0.6
    second = _half_of(_LAST if people else _THINGS, half)
    pairs = rng.sample(range(len(_FIRST) * len(second)), count)
    names = [(_FIRST[p // len(second)], second[p % len(second)]) for p in pairs]
    if people:
        return [f"{first} {last}" for first, last in names]
    return [f"{first}'s {thing}" for first, thing in names]
