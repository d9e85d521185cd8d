"""Exam of `millpond demo`: one text of `pond-recall` and its questions, as a file that comes with the model.

`python -m millpond_lab.pond.demo_file` writes the file again.
"""

from __future__ import annotations

import json
from typing import Any

from millpond.models.installed import BUNDLED
from millpond_lab.pond.facts import draw_paper

#: The exam in the file, which the demo reads where it has no other.
LENGTH, SEED = 2048, 0
PAIRS = 32  #: facts of the text, and questions about it
AROUND = 7  #: tokens of `<bos>`, a question and its answer
FILE = BUNDLED / "pond-recall" / "demo.json"


def demo_exam(length: int, seed: int) -> dict[str, Any]:
    """A held-out text of `length` words with 32 pairs, and a question about each, in random order.

    Returns:
        `length` and `seed` as given; `text`, length + 1 word ids with `<bos>` first; `questions`, three ids each; and
        `answers`, one id each.

    Raises:
        OptionError: a length that cannot hold the pairs.
    """
    paper = draw_paper("recall", seed, 0, length + AROUND, {"pairs": PAIRS, "questions": PAIRS})
    return {
        "length": length,
        "seed": seed,
        "text": paper.text.tolist(),
        "questions": [list(question.question) for question in paper.asked],
        "answers": [question.references[0] for question in paper.asked],
    }


def file_text() -> str:
    """The content of the file."""
    return json.dumps(demo_exam(LENGTH, SEED), separators=(",", ":")) + "\n"


if __name__ == "__main__":
    FILE.write_text(file_text(), encoding="utf-8")
