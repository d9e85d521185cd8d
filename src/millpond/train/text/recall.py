"""Recall in English: facts hidden in running text, and the questions about them.

Everything is drawn from a stream that the caller names. This module knows no tokenizer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


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
    ("The secret number of {key} is {value}.", "What is the secret number of {key}?", "The secret number of {key} is",
     True),
    ("{key} lives at number {value}.", "At which number does {key} live?", "{key} lives at number", True),
    ("The favourite word of {key} is {value}.", "What is the favourite word of {key}?", "It is", False),
    ("{key} has hidden the {value}.", "What has {key} hidden?", "{key} has hidden the", False),
    ("The gift for {key} is a {value}.", "What is the gift for {key}?", "The gift for {key} is a", False),
)  # fmt: skip
FORMS = len(_FORMS)


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence to hide, the question about it, up to the answer, and the answer."""

    told: str
    question: str
    answer: str
    is_number: bool


def draw_facts(rng: random.Random, count: int, form: int | None = None) -> list[Fact]:
    """`count` facts of one form about different people or things, with different answers.

    Args:
        rng: where the draws come from.
        count: how many, at most the number of things that can be an answer.
        form: which of the `FORMS`; None draws it.
    """
    told, question, lead, is_number = _FORMS[rng.randrange(FORMS) if form is None else form]
    if is_number:
        figures = rng.choice((3, 4, 5))
        values = [str(v) for v in rng.sample(range(10 ** (figures - 1), 10**figures), count)]
    else:
        values = rng.sample(_THINGS, count)
    facts = []
    for key, value in zip(_keys(rng, count), values, strict=True):
        asked = f"{question} {lead}".format(key=key)
        facts.append(Fact(told.format(key=key, value=value), asked, f" {value}.", is_number))
    return facts


def _keys(rng: random.Random, count: int) -> list[str]:
    """Different names: of people, or of things with a first name to them."""
    second = _LAST if rng.random() < 0.6 else _THINGS
    pairs = rng.sample(range(len(_FIRST) * len(second)), count)
    names = [(_FIRST[p // len(second)], second[p % len(second)]) for p in pairs]
    if second is _LAST:
        return [f"{first} {last}" for first, last in names]
    return [f"{first}'s {thing}" for first, thing in names]
