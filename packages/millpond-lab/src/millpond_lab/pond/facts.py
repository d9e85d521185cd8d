"""Facts and questions of `pond-recall` by family, the texts that hold them, and exams that training never reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import numpy as np

from millpond.errors import OptionError, unknown
from millpond_lab.pond import words as w
from millpond_lab.pond.words import BOS_ID, ID, ids

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


_GROUP = np.array(ids(w.FILLER))

#: uniform: every word equally often. zipf: some words often, others by text. refrain: one sentence over and over.
Filler = Literal["uniform", "zipf", "refrain"]
FILLERS: tuple[Filler, ...] = ("uniform", "zipf", "refrain")


def stream(*name: object) -> np.random.Generator:
    """The random stream of that name: equal names give equal numbers on every machine."""
    digest = blake2b(":".join(map(str, name)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest, "big")))


def filler(rng: np.random.Generator, length: int, kind: Filler) -> np.ndarray:
    """Filler word ids, (length,)."""
    if kind == "uniform":
        return rng.choice(_GROUP, length)
    if kind == "zipf":
        weights = 1 / (1 + np.arange(len(_GROUP))) ** rng.uniform(0.5, 1.1)
        return rng.choice(rng.permutation(_GROUP), length, p=weights / weights.sum())
    return np.resize(rng.choice(_GROUP, int(rng.integers(8, 21))), length)


def hide(
    rng: np.random.Generator, facts: Facts, length: int, kind: Filler = "uniform", depth: float | None = None
) -> np.ndarray:
    """Word ids (length,): the facts at random places in filler, the facts of a thread in their order.

    Args:
        rng: of the places and the filler.
        facts: what the text says.
        length: words of the text, the facts included.
        kind: of the filler.
        depth: where the first fact stands, 0 at the beginning to 1 at the end; None: anywhere.

    Raises:
        OptionError: the facts alone are longer than the text.
    """
    room = length - facts.size
    if room < 0:
        raise OptionError(f"the facts take {facts.size} words; length {length} must be at least that")
    owners = rng.permutation(np.repeat(np.arange(len(facts.threads)), [len(t) for t in facts.threads]))
    places = np.sort(rng.integers(0, room + 1, len(owners)))
    if depth is not None and len(owners):
        places = np.sort(np.r_[round(depth * room), places[1:]])
    told = [iter(thread) for thread in facts.threads]
    text, before = filler(rng, room, kind), 0
    parts: list[np.ndarray] = []
    for owner, place in zip(owners, places, strict=True):
        parts += [text[before:place], np.array(next(told[owner]))]
        before = int(place)
    return np.concatenate([*parts, text[before:]]).astype(np.int64)


Knobs = Mapping[str, Any]


class Paper(NamedTuple):
    """One examination paper: a text, `<bos>` first, and questions about it."""

    text: np.ndarray  # (L,) word ids
    asked: list[FactQuestion]


def draw_paper(task: str, seed: int, index: int, length: int, knobs: Knobs | None = None) -> Paper:
    """The paper number `index` of a task under `seed`.

    Args:
        task: one of `TASKS`.
        seed, index: name the paper.
        length: tokens, `<bos>` and the longest question with its answer included.
        knobs: `questions` (asked of one text, default 1), `depth` (of the first fact, 0 to 1), and the numbers that
            the task's facts take, such as `pairs`.

    Raises:
        OptionError: no such task, or facts that do not fit into `length`.
    """
    if task not in _FACTS:
        raise unknown("task of pond-recall", task, _FACTS)
    knobs = knobs or {}
    rng = stream("pond", "eval", task, seed, index)
    facts = _FACTS[task](Words(rng), knobs)
    family = _FAMILY.get(task, task)
    asked = [question for question in facts.asked if question.family == family]
    wanted = int(knobs.get("questions", 1))
    if not 1 <= wanted <= len(asked):
        raise OptionError(f"questions={wanted}: a text of {task} answers 1 to {len(asked)}")
    chosen = [asked[int(i)] for i in rng.permutation(len(asked))[:wanted]]
    longest = max(len(question.question) + len(question.answer) for question in chosen)
    text = hide(rng, facts, length - 1 - longest, _filler(task, knobs), knobs.get("depth"))
    return Paper(np.concatenate([[BOS_ID], text]), chosen)


def spell(ids: np.ndarray | tuple[int, ...]) -> str:
    """Word ids as text."""
    return " ".join(w.VOCABULARY[int(i)] for i in ids)


def _filler(task: str, knobs: Knobs) -> Filler:
    """The one needle of variant 1 lies in a refrain, as in RULER; everything else in varied words."""
    return "refrain" if task == "niah_single" and int(knobs.get("variant", 1)) == 1 else "zipf"


def _pairs(count: int) -> Callable[[Words, Knobs], Facts]:
    return lambda draw, knobs: pairs(draw, int(knobs.get("pairs", count)))


def _multikey(draw: Words, knobs: Knobs) -> Facts:
    return pairs(draw, 4 if int(knobs.get("variant", 1)) == 1 else 96)


_FACTS: dict[str, Callable[[Words, Knobs], Facts]] = {
    "recall": _pairs(32),
    "overwritten": lambda draw, knobs: retold(draw, int(knobs.get("pairs", 12))),
    "niah_single": _pairs(1),
    "niah_multikey": _multikey,
    "niah_multivalue": lambda draw, knobs: manifold(draw, int(knobs.get("pairs", 8)), 4),
    "niah_multiquery": _pairs(16),
    "tracking": lambda draw, knobs: chains(draw, int(knobs.get("chains", 4)), int(knobs.get("hops", 4))),
    "copy": lambda draw, knobs: passages(draw, int(knobs.get("passages", 4)), int(knobs.get("words", 8))),
    "frequent_words": lambda draw, knobs: frequent(draw, int(knobs.get("words", 60))),
    "common_words": lambda draw, knobs: common(draw, int(knobs.get("words", 44))),
}
#: The family of questions that a task asks, where its name is another.
_FAMILY = {
    "niah_single": "recall",
    "niah_multikey": "recall",
    "niah_multivalue": "multivalue",
    "niah_multiquery": "multiquery",
    "frequent_words": "frequent",
    "common_words": "common",
}
TASKS = tuple(_FACTS)
