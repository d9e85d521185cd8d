"""A choice that any text gives: which of several endings belongs to the beginning of a paragraph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from transformers import PreTrainedTokenizerBase

from millpond.errors import DataError, OptionError
from millpond.option_ranges import SOME_POSITIONS
from millpond_lab.evals.data.data_files import read_text, refuse_pond
from millpond_lab.evals.data.generated_task import at_least, stream
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Kind, Task, task

_BLANK = re.compile(r"\n\s*\n")
#: The beginning of a paragraph, and its ending.
_Pair = tuple[str, str]


@task("endings")
def endings(
    path: Annotated[str, "a file of UTF-8 text with paragraphs between blank lines; may end in .gz"] = "",
    shots: Annotated[int, "paragraphs with their own endings that come first", SOME_POSITIONS] = 5,
    choices: Annotated[int, "endings to choose from, one of them right", SOME_POSITIONS] = 4,
    beginning: Annotated[int, "words of a paragraph's beginning", SOME_POSITIONS] = 32,
    ending: Annotated[int, "words of an ending", SOME_POSITIONS] = 10,
) -> Task:
    """Choose the likeliest of several endings of a paragraph, each of as many words, after a few examples.

    The wrong endings are what follows as many words in other paragraphs of the text. No paragraph is asked about twice.
    """
    at_least("endings", 1, shots=shots, beginning=beginning, ending=ending)
    at_least("endings", 2, choices=choices)
    return _Endings(path, shots, choices, beginning, ending)


@dataclass(frozen=True)
class _Endings:
    path: str
    shots: int
    choices: int
    beginning: int
    ending: int
    kind: Kind = "choice"

    def samples(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> Iterator[Sample]:
        """See `Task.samples`."""
        refuse_pond("endings", tokenizer)
        pairs = self._pairs()
        order = stream("endings", seed).sample(range(len(pairs)), len(pairs))
        for asked in order[:count]:
            rng = stream("endings", seed, asked)
            others = rng.sample([i for i in range(len(pairs)) if i != asked], self.shots + self.choices - 1)
            right = rng.randrange(self.choices)
            ends = [pairs[i][1] for i in others[self.shots :]]
            ends.insert(right, pairs[asked][1])
            question = Question(f"\n\n{pairs[asked][0]}", (ends[right],), choices=tuple(ends), right=right)
            context = "\n\n".join("".join(pairs[i]) for i in others[: self.shots])
            yield Sample(f"{seed}-{asked}", context, (question,), {"paragraph": asked})

    def score(self, question: Question, answer: str) -> float:
        """Raise: this task decodes no answers.

        Raises:
            OptionError: always.
        """
        raise OptionError("endings: a task of the kind choice decodes no answer, so there is none to score")

    def _pairs(self) -> list[_Pair]:
        if not self.path:
            raise DataError("endings: this task reads a text file, and none was named; add path=FILE to its options")
        text = read_text(self.path)
        if not text.strip():
            raise DataError(f"endings: {self.path} holds no text; name a file with some")
        paragraphs = [paragraph.split() for paragraph in _BLANK.split(text)]
        end = self.beginning + self.ending
        found = [
            (" ".join(words[: self.beginning]), " " + " ".join(words[self.beginning : end]))
            for words in paragraphs
            if len(words) >= end
        ]
        if len(found) < self.shots + self.choices:
            raise DataError(
                f"{self.path} has {len(found)} paragraphs of {end} words or more, and a question takes "
                f"{self.shots + self.choices}; name a longer text, or lower beginning, ending or shots"
            )
        return found
