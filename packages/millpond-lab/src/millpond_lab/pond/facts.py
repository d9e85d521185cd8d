"""Facts and questions by family, as word ids.

A family draws facts, each a short run of words that a text states somewhere, in the order given, and knows which
questions they answer. It knows nothing of the filler around them, of samples or of training.

| family | a text says | a question and its answer |
|---|---|---|
| recall | `emma kite` | `<ask> emma <is>` emma kite |
| overwritten | `emma kite` ... `<let> emma drum` | `<ask> emma <is>` emma drum |
| multivalue | `emma kite` ... `emma drum` | `<all> emma <is>` emma kite drum, in any order |
| multiquery | pairs | `<each> emma karl nora otto <is>` emma kite karl lamp nora harp otto coin |
| tracking | `<let> kite oslo` ... `<let> oslo riga` | `<trace> kite <is>` kite oslo riga |
| copy | `<open> emma kite drum harp <close>` | `<copy> emma <is>` emma kite drum harp |
| frequent | animals, some of them often | `<most> <is>` the three most frequent, the first first |
| common | plants, four of them often | `<common> <is>` these four in the order of the alphabet |

Every answer ends with `<eos>`. An answer names again what it is about: so the looking up happens while it is decoded,
from what is kept of the text by then, and not while the question is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from millpond_lab.pond import words as w
from millpond_lab.pond.words import ID, ids

_IDS = {group: np.array(ids(group)) for group in w.GROUPS}
FAMILIES = ("recall", "overwritten", "multivalue", "multiquery", "tracking", "copy", "frequent", "common")
ASKED_TOGETHER = 4  # names in a multiquery
COMMON_WORDS = 4  # plants that are common
TOP = 3  # animals that are asked for
RIVALS = 8  # animals that are not frequent
ODDMENTS = 12  # plants that are not common


@dataclass(frozen=True, slots=True)
class FactQuestion:
    """A question: its words, `<is>` included, and those of its answer, `<eos>` included."""

    family: str
    question: tuple[int, ...]
    answer: tuple[int, ...]
    any_order: bool = False  # of the words that count

    @property
    def scored(self) -> tuple[bool, ...]:
        """Which words of the answer count: not `<eos>`, and not what the question has named."""
        return tuple(word != w.EOS_ID and word not in self.question for word in self.answer)

    @property
    def references(self) -> tuple[int, ...]:
        """The words of the answer that count."""
        return tuple(word for word, counts in zip(self.answer, self.scored, strict=True) if counts)

    def accepted(self, place: int, before: Sequence[int]) -> tuple[int, ...]:
        """The right words at `place` of the answer, after the words `before` it: several where the order is free."""
        if not (self.any_order and self.scored[place]):
            return self.answer[place : place + 1]
        return tuple(word for word in self.references if word not in before)


@dataclass(slots=True)
class Facts:
    """Threads of facts: each thread's facts keep their order in the text; and the questions that they answer."""

    threads: list[list[tuple[int, ...]]]
    asked: list[FactQuestion]

    @property
    def size(self) -> int:
        """Words in all facts."""
        return sum(len(fact) for thread in self.threads for fact in thread)


class Words:
    """Hands out words of the groups, none twice, so that no two facts speak of the same name."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self._left = {group: rng.permutation(_IDS[group]) for group in (w.NAMES, w.THINGS, w.TOWNS)}

    def fresh(self, group: tuple[str, ...], count: int) -> list[int]:
        """Up to `count` words of `group` that no one has had: fewer where they have run out."""
        left = self._left[group]
        taken, self._left[group] = left[:count], left[count:]
        return [int(word) for word in taken]

    def some(self, group: tuple[str, ...], count: int) -> list[int]:
        """`count` different words of `group`, drawn again each time."""
        return [int(word) for word in self.rng.permutation(_IDS[group])[:count]]


def _ask(family: str, mark: str, subject: list[int], answer: list[int]) -> FactQuestion:
    return FactQuestion(family, (ID[mark], *subject, w.IS_ID), (*answer, w.EOS_ID))


def pairs(draw: Words, count: int) -> Facts:
    """`count` names, each with one fact; a question about every name, and groups of four together."""
    names = draw.fresh(w.NAMES, count)
    told = {name: int(draw.rng.choice(_IDS[w.THINGS])) for name in names}
    asked = [_ask("recall", w.ASK, [name], [name, told[name]]) for name in names]
    for start in range(0, len(names) - ASKED_TOGETHER + 1, ASKED_TOGETHER):
        group = [int(name) for name in draw.rng.permutation(names[start : start + ASKED_TOGETHER])]
        asked.append(_ask("multiquery", w.EACH, group, [word for name in group for word in (name, told[name])]))
    return Facts([[(name, thing)] for name, thing in told.items()], asked)


def retold(draw: Words, count: int) -> Facts:
    """`count` names, each with one fact and later another, which then holds."""
    facts = Facts([], [])
    for name in draw.fresh(w.NAMES, count):
        first, last = draw.some(w.THINGS, 2)
        facts.threads.append([(name, first), (ID[w.LET], name, last)])
        facts.asked.append(_ask("overwritten", w.ASK, [name], [name, last]))
    return facts


def manifold(draw: Words, count: int, values: int) -> Facts:
    """`count` names, each with `values` different facts, which all hold."""
    facts = Facts([], [])
    for name in draw.fresh(w.NAMES, count):
        things = draw.some(w.THINGS, values)
        facts.threads.append([(name, thing) for thing in things])
        asked = _ask("multivalue", w.ALL, [name], [name, *(int(thing) for thing in draw.rng.permutation(things))])
        facts.asked.append(replace(asked, any_order=True))
    return facts


def chains(draw: Words, count: int, hops: int) -> Facts:
    """`count` chains of `hops` links, each from a thing of its own through towns of its own."""
    facts = Facts([], [])
    for start in draw.some(w.THINGS, count):
        places = draw.fresh(w.TOWNS, hops)
        if len(places) < hops:
            break
        links = zip([start, *places], places, strict=False)
        facts.threads.append([(ID[w.LET], source, target) for source, target in links])
        facts.asked.append(_ask("tracking", w.TRACE, [start], [start, *places]))
    return facts


def passages(draw: Words, count: int, length: int) -> Facts:
    """`count` passages of `length` things, each under a name, no thing twice."""
    facts = Facts([], [])
    for name in draw.fresh(w.NAMES, count):
        text = draw.fresh(w.THINGS, length)
        facts.threads.append([(ID[w.OPEN], name, *text, ID[w.CLOSE])])
        facts.asked.append(_ask("copy", w.COPY, [name], [name, *text]))
    return facts


def frequent(draw: Words, count: int) -> Facts:
    """About `count` animals: three are frequent, each about twice as often as the next, and eight are not."""
    counts = [round(count * share) for share in (0.5, 0.24, 0.12)]
    counts = [max(counts[0], 6), max(counts[1], 4), max(counts[2], 2)]
    most = max(1, counts[2] // 2)
    kinds = draw.some(w.ANIMALS, TOP + RIVALS)
    rest = max(0, count - sum(counts))
    shared = [min(most, rest // RIVALS + (place < rest % RIVALS)) for place in range(RIVALS)]
    told = [kind for kind, times in zip(kinds, counts + shared, strict=True) for _ in range(times)]
    return Facts(_singly(told), [_ask("frequent", w.MOST, [], kinds[:TOP])])


def common(draw: Words, count: int) -> Facts:
    """About `count` plants: four are common, equally often, and up to twelve are stated once."""
    times = max(3, (count - ODDMENTS) // COMMON_WORDS)
    kinds = draw.some(w.PLANTS, COMMON_WORDS + ODDMENTS)
    odd = kinds[COMMON_WORDS:][: max(0, count - COMMON_WORDS * times)]
    told = [kind for kind in kinds[:COMMON_WORDS] for _ in range(times)] + odd
    return Facts(_singly(told), [_ask("common", w.COMMON, [], sorted(kinds[:COMMON_WORDS]))])


def _singly(told: list[int]) -> list[list[tuple[int, ...]]]:
    """Each word a fact and a thread of its own."""
    return [[(word,)] for word in told]
