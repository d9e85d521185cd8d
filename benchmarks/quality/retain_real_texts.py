"""Texts to train retaining heads of a real model on: cuts of books, half of them with facts and questions about them.

    python benchmarks/quality/retain_real_texts.py --books FOLDER --out texts.jsonl [--facts pond]

Facts in prose: subjects, sentences and questions are others than those of the task `prose_facts`. Facts of the kind
that `pond-text` knows (--facts pond): the sentences are those of the task `pond_facts`, since the model knows no
others; names, things and the random stream are not. The books that the evaluation reads are left out, so that what is
measured there was not seen in training.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from millpond_lab.evals.data.generated_task import number, stream
from millpond_lab.evals.data.haystack import depths, from_book, place, read_sentences
from millpond_lab.evals.data.synthetic_english import keys
from millpond_lab.pond.english_facts import draw_facts
from millpond_lab.train.text.data import HELD_OUT, read_document

#: Books of the evaluation; `pond-text` has not read its own.
LEFT_OUT = {"prose": {"bleak_house", "great_expectations"}, "pond": {Path(name).stem for name in HELD_OUT}}
#: Characters of a text of `pond-text` with the line breaks of its book: 1,300 to 1,500 tokens.
CHARACTERS = 5200
#: Facts of a text of `pond-text`, at most.
POND_FACTS = 8
#: Words of a text: about 800 to 1,000 tokens of most tokenizers.
WORDS = (560, 720)
NUMBERED = (
    "room of the ambassador",
    "price of the grey mare",
    "code of the post office",
    "size of the garrison",
    "number of rings of the oak",
    "weight of the great bell",
    "ticket of the old admiral",
    "page of the missing chapter",
    "distance to the lighthouse",
    "reward for the stolen brooch",
)
WORDED = (
    "name of the inn",
    "favourite dish of the curate",
    "gift from the uncle",
    "motto of the school",
    "treasure in the cellar",
    "subject of the lecture",
    "last wish of the duchess",
    "cause of the quarrel",
    "device on the banner",
    "cure for the fever",
)
SAID = (
    "The {name} was {value}.",
    "Everyone knew that the {name} was {value}.",
    "As for the {name}, it was {value}.",
    "He wrote down {value}, which was the {name}.",
    "{value} - such was the {name}.",
)
ASKED = (
    "Tell me the {name}.",
    "What was the {name}?",
    "Do you remember the {name}?",
    "Say the {name}:",
    "And the {name}?",
)


def phrase(rng: random.Random) -> str:
    """A thing with two adjectives, for example "a rusty silent piano"."""
    first, second = (key.split("-") for key in keys(rng, 2))
    return f"a {first[0]} {' '.join(second)}"


def with_questions(sentences: Iterator[str], rng: random.Random) -> dict[str, str]:
    """A cut of a book with one to four facts in it, and questions about all of them."""
    numbered = rng.random() < 0.5
    names = rng.sample(NUMBERED if numbered else WORDED, rng.randint(1, 4))
    facts = [(name, number(rng, rng.randint(4, 8)) if numbered else phrase(rng)) for name in names]
    said = [rng.choice(SAID).format(name=name, value=value) for name, value in facts]
    context = " ".join(place(cut(sentences, rng), list(zip(depths(rng, len(facts)), said, strict=True))))
    rng.shuffle(facts)
    asked = [f"{rng.choice(ASKED).format(name=name)} The {name} was {value}." for name, value in facts]
    return {"context": context, "question": "\n".join(asked[:-1]), "answer": asked[-1]}


def with_pond_facts(sentences: Iterator[str], rng: random.Random) -> dict[str, str]:
    """A cut of a book with one to eight facts of one kind that `pond-text` knows, and questions about all of them."""
    facts = draw_facts(rng, rng.randint(1, POND_FACTS), half="learned")
    told = list(zip(depths(rng, len(facts)), (fact.told for fact in facts), strict=True))
    context = " ".join(place(cut(sentences, rng), told))
    rng.shuffle(facts)
    asked = [f"{fact.question}{fact.answer}" for fact in facts]
    return {"context": context, "question": " ".join(asked[:-1]), "answer": asked[-1]}


def passage(book: str, rng: random.Random) -> str:
    """A passage of a book as it stands there, from a blank on."""
    start = book.index(" ", rng.randrange(len(book) - 2 * CHARACTERS))
    return book[start : start + CHARACTERS]


def cut(sentences: Iterator[str], rng: random.Random) -> list[str]:
    """Whole sentences of a book."""
    words, found = rng.randint(*WORDS), []
    while words > 0:
        found.append(next(sentences))
        words -= len(found[-1].split())
    return found


def rows(files: list[Path], texts: int) -> Iterator[dict[str, str]]:
    """Cuts of books, every other one with facts in prose."""
    books = [read_sentences(str(file)) for file in files]
    for index in range(texts):
        rng = stream("retain texts", index)
        sentences = from_book(rng.choice(books), rng)
        yield {"text": " ".join(cut(sentences, rng))} if index % 2 else with_questions(sentences, rng)


def pond_rows(files: list[Path], texts: int) -> Iterator[dict[str, str]]:
    """Passages of books, and cuts with facts of the kind that `pond-text` knows, in turn."""
    books = [read_document(file) for file in files]
    sentences = [read_sentences(str(file)) for file in files]
    for index in range(texts):
        rng = stream("retain pond texts", index)
        book = rng.randrange(len(books))
        if index % 2:
            yield {"text": passage(books[book], rng)}
        else:
            yield with_pond_facts(from_book(sentences[book], rng), rng)


ROWS: dict[str, Callable[[list[Path], int], Iterator[dict[str, str]]]] = {"prose": rows, "pond": pond_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True, help="a folder with .txt files")
    parser.add_argument("--texts", type=int, default=1200)
    parser.add_argument("--facts", choices=ROWS, default="prose", help="prose, or of the kind that pond-text knows")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    files = [file for file in sorted(args.books.glob("*.txt")) if file.stem not in LEFT_OUT[args.facts]]
    with args.out.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in ROWS[args.facts](files, args.texts))


if __name__ == "__main__":
    main()
