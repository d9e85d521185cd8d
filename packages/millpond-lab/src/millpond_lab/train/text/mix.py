"""Recall tasks mixed into running text: hidden facts with later questions, and repeated passages.

Works on token ids; a window keeps its length, since the text gives way to what is put in.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from millpond_lab.pond.english_facts import Fact, draw_facts
from millpond_lab.train.text.recipe import Tasks
from millpond_lab.train.text.tokenizer import plain_ids

Ids = npt.NDArray[np.uint16]

_MAX_FACTS = 16
_TOKENS_PER_FACT = 36  # statement and question, on average
_AGAIN = ("Once more:", "To repeat:", "I say it again:", "As was told above:")


class Mixer:
    """Puts tasks into a share of the windows of text that `tokenizer` made."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        size = tokenizer.get_vocab_size()
        ends = [i for i in range(size) if tokenizer.decode([i]).endswith(("\n\n", ".", "?", "!"))]
        self._ends_sentence = np.zeros(size, dtype=bool)
        self._ends_sentence[ends] = True

    def mix(self, rng: random.Random, text: Ids, tasks: Tasks) -> Ids:
        """A window as long as `text`; which task it gets, if any, is drawn."""
        draw = rng.random()
        if draw >= 1 - tasks.drills:
            return self.drill(rng, text)
        if draw < tasks.facts:
            return self.with_facts(rng, text)
        if draw < tasks.facts + tasks.copies:
            return self.with_copies(rng, text)
        return text

    def with_facts(self, rng: random.Random, text: Ids) -> Ids:
        """Facts at random sentence ends, each with one later question, in random order, most of them near the end."""
        most = max(2, min(_MAX_FACTS, len(text) // (2 * _TOKENS_PER_FACT)))
        facts = draw_facts(rng, rng.randint(2, most))
        pieces: list[tuple[float, Sequence[int]]] = []
        for fact in facts:
            told = rng.random() * 0.8
            asked = 1.0 if rng.random() < 0.6 else rng.uniform(told, 1.0)
            pieces += [(told, self.told(fact)), (asked + rng.random() * 1e-6, self.asked(fact))]
        return self._place(text, pieces)

    def with_copies(self, rng: random.Random, text: Ids) -> Ids:
        """One or several passages of the text again, word for word, some way behind where they stood."""
        lengths = [rng.randint(12, 64)]
        while sum(lengths) < len(text) // 4 and rng.random() < 0.8:
            lengths.append(rng.randint(12, 64))
        leads = [plain_ids(self.tokenizer, f" {rng.choice(_AGAIN)}") if rng.random() < 0.5 else [] for _ in lengths]
        keep = len(text) - sum(lengths) - sum(map(len, leads))
        pieces: list[tuple[float, Sequence[int]]] = []
        for length, lead in zip(lengths, leads, strict=True):
            if keep > length:
                start = rng.randrange(keep - length)
                behind = rng.uniform(start + length, keep) / keep
                pieces.append((behind, [*lead, *text[start : start + length].tolist()]))
        return self._place(text, pieces)

    def drill(self, rng: random.Random, text: Ids) -> Ids:
        """A window made of passages that come again, most of them tokens in random order.

        Nothing but an earlier occurrence predicts those, so they grow the induction heads that recall needs.
        """
        parts: list[Ids] = []
        longest, widest = min(48, len(text) // 5), min(40, len(text) // 8)
        done = taken = 0
        while done < len(text):
            length, gap = rng.randint(6, longest), rng.randint(0, widest)
            passage, between = text[taken : taken + length], text[taken + length : taken + length + gap]
            if rng.random() < 0.7:
                passage = passage[rng.sample(range(len(passage)), len(passage))]
            parts += [passage, between, passage]
            done += 2 * len(passage) + len(between)
            taken += len(passage) + len(between)
        return np.concatenate(parts)[: len(text)]

    def told(self, fact: Fact) -> list[int]:
        """The ids of the fact as a sentence within text."""
        return plain_ids(self.tokenizer, f" {fact.told}")

    def asked(self, fact: Fact) -> list[int]:
        """The ids of the question with its answer within text."""
        return plain_ids(self.tokenizer, f" {fact.question}{fact.answer}")

    def _place(self, text: Ids, pieces: list[tuple[float, Sequence[int]]]) -> Ids:
        """`text`, cut by what the pieces need, with each piece behind the next sentence end after its share."""
        keep = len(text) - sum(len(piece) for _, piece in pieces)
        if keep < 0:
            return text
        ends = np.flatnonzero(self._ends_sentence[text[:keep]]) + 1
        parts: list[Ids] = []
        before = 0
        for share, piece in sorted(pieces):
            here = min(keep, math.ceil(share * keep))
            behind = int(np.searchsorted(ends, here))
            here = int(ends[behind]) if behind < len(ends) else keep
            parts += [text[before:here], np.array(piece, dtype=np.uint16)]
            before = here
        return np.concatenate([*parts, text[before:keep]])
