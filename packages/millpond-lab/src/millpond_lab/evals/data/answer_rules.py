"""Instructions whose obedience code can check: each is a sentence of a system message and a test of an answer."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from millpond_lab.evals.data.synthetic_english import words

RuleKind = Literal["begin", "end", "name", "capitals", "items", "brackets"]
KINDS: tuple[RuleKind, ...] = get_args(RuleKind)
_COUNTS = {"two": 2, "three": 3, "four": 4}
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """One instruction.

    Attributes:
        kind: what it is about. word: the word that it asks for, or how many items in words; "" if there is none.
    """

    kind: RuleKind
    word: str = ""

    @property
    def told(self) -> str:
        """The sentence that gives it."""
        return {
            "begin": f"Begin every answer with the word {self.word}.",
            "end": f"End every answer with the word {self.word}.",
            "name": f"Mention the name {self.word} in every answer.",
            "capitals": "Write every answer in capital letters only.",
            "items": f"Every answer has exactly {self.word} parts, with a semicolon between them.",
            "brackets": "Put every answer in square brackets.",
        }[self.kind]

    def obeyed(self, answer: str) -> bool:
        """Whether an answer obeys it; one without a word obeys none.

        Words count whatever the case, since another rule may ask for capitals; marks around an answer do not.
        """
        found: list[str] = [word.lower() for word in _WORD.findall(answer)]
        if not found:
            return False
        match self.kind:
            case "begin":
                return found[0] == self.word.lower()
            case "end":
                return found[-1] == self.word.lower()
            case "name":
                return self.word.lower() in found
            case "capitals":
                return answer.upper() == answer != answer.lower()
            case "items":
                parts = [part for part in answer.split(";") if _WORD.search(part)]
                return len(parts) == _COUNTS[self.word]
            case "brackets":
                whole = answer.strip()
                return whole.startswith("[") and whole.rstrip(".").endswith("]")


def draw_rules(rng: random.Random, kinds: Sequence[RuleKind]) -> tuple[AnswerRule, ...]:
    """A rule of each kind, each with a word of its own; all of them can be obeyed at once."""
    own = iter(words(rng, len(kinds)))
    given = {"begin", "end", "name"}
    return tuple(
        AnswerRule(kind, next(own).capitalize() if kind in given else rng.choice([*_COUNTS]) if kind == "items" else "")
        for kind in kinds
    )


def obedient(rules: Sequence[AnswerRule], said: Sequence[str]) -> str:
    """An answer out of at least four items that obeys all rules."""
    by_kind = {rule.kind: rule.word for rule in rules}
    parts = list(said[: _COUNTS[by_kind["items"]] if "items" in by_kind else 2])
    if "name" in by_kind:
        parts[0] = f"{parts[0]} {by_kind['name']}"
    if "begin" in by_kind:
        parts[0] = f"{by_kind['begin']} {parts[0]}"
    if "end" in by_kind:
        parts[-1] = f"{parts[-1]} {by_kind['end']}"
    answer = "; ".join(parts)
    answer = answer.upper() if "capitals" in by_kind else answer
    return f"[{answer}]" if "brackets" in by_kind else answer
