"""Training data of `pond-text`: documents as one file of tokens, and windows of it with recall tasks mixed in.

A batch is a function of (seed, step, place): the file is read at the places of a golden-ratio walk, which covers it
evenly however long the run is, and every other draw comes from a stream of (seed, step).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from millpond.errors import DataError
from millpond_lab.train.text.mix import Mixer
from millpond_lab.train.text.recipe import Tasks
from millpond_lab.train.text.tokenizer import BOS_ID, EOS_ID, TOKENIZER_FILE, grow_tokenizer, plain_ids

#: Whole documents that training never sees, by file name: tests measure on them.
HELD_OUT = (
    "great_expectations.txt",
    "the_adventures_of_sherlock_holmes.txt",
    "tinyshakespeare.txt",
    "wikitext2_test.txt",
    "wikitext2_valid.txt",
)


def training_files(folder: Path) -> list[Path]:
    """The text files of `folder` and of its `gutenberg`, in the order of their names, without the held-out ones.

    Raises:
        DataError: there is none.
    """
    files = sorted([*folder.glob("*.txt"), *(folder / "gutenberg").glob("*.txt")], key=lambda file: file.name)
    chosen = [file for file in files if file.name not in HELD_OUT]
    if not chosen:
        raise DataError(f"no text to train on: {folder} and {folder / 'gutenberg'} hold no *.txt besides {HELD_OUT}")
    return chosen


def held_out_files(folder: Path) -> list[Path]:
    """Those of `HELD_OUT` that lie in `folder` or its `gutenberg`, in the order of their names."""
    places = [(folder / name, folder / "gutenberg" / name) for name in HELD_OUT]
    return [place for pair in places for place in pair if place.is_file()]


def read_document(file: Path) -> str:
    """The cleaned text of one file.

    Raises:
        DataError: it cannot be read as UTF-8.
    """
    try:
        return clean(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text: {error}") from error


def clean(text: str) -> str:
    r"""One kind of line break, no blanks at the end of a line, at most one empty line in a row.

    Example:
        >>> clean("one \r\ntwo\n\n\n\nthree\n")
        'one\ntwo\n\nthree\n'
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).lstrip("\n")


TOKENS_FILE, TOKENS_NOTE = "tokens.u16", "tokens.json"
_GOLDEN = 0.6180339887498949

Ids = npt.NDArray[np.uint16]


class TokenFile:
    """The training documents as token ids, each closed by `<eos>`, read from a memory-mapped file."""

    def __init__(self, ids: Ids, documents: dict[str, int], tokenizer: Tokenizer) -> None:
        self.ids, self.documents, self.tokenizer = ids, documents, tokenizer

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, ordinal: int, length: int, seed: int) -> Ids:
        """`length` tokens from the place of the `ordinal`-th window of the walk."""
        place = (ordinal * _GOLDEN + random.Random(f"walk {seed}").random()) % 1.0
        start = int(place * (len(self.ids) - length))
        return self.ids[start : start + length]


def open_tokens(data: Path, cache: Path, vocab_size: int) -> TokenFile:
    """The token file of the documents in `data`, made once in `cache` together with the tokenizer.

    Raises:
        DataError: no documents, or `cache` holds the tokens of other documents.
    """
    files = training_files(data)
    sizes = {file.name: file.stat().st_size for file in files}
    note = cache / TOKENS_NOTE
    if not note.is_file():
        _write(files, sizes, cache, vocab_size)
    known = json.loads(note.read_text(encoding="utf-8"))
    if known["bytes"] != sizes or known["vocab_size"] != vocab_size:
        raise DataError(f"{note} was made from other documents or another vocabulary; use another folder")
    ids = np.memmap(cache / TOKENS_FILE, dtype=np.uint16, mode="r")
    return TokenFile(ids, known["tokens"], Tokenizer.from_file(str(cache / TOKENIZER_FILE)))


def _write(files: Sequence[Path], sizes: dict[str, int], cache: Path, vocab_size: int) -> None:
    """Grow the tokenizer and write the ids; the note comes last, so a half-written file is never taken for whole."""
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer = grow_tokenizer((paragraph for file in files for paragraph in _paragraphs(file)), vocab_size)
    tokenizer.save(str(cache / TOKENIZER_FILE))
    counts = {}
    with (cache / TOKENS_FILE).open("wb") as out:
        for file in files:
            ids = [i for part in tokenizer.encode_batch(_paragraphs(file), add_special_tokens=False) for i in part.ids]
            np.array([*ids, EOS_ID], dtype=np.uint16).tofile(out)
            counts[file.name] = len(ids) + 1
    note = {"vocab_size": vocab_size, "bytes": sizes, "tokens": counts}
    (cache / TOKENS_NOTE).write_text(json.dumps(note, indent=1), encoding="utf-8")


def _paragraphs(file: Path) -> list[str]:
    """The cleaned text, cut after each empty line; joined it is the text again."""
    parts = read_document(file).split("\n\n")
    return [part + "\n\n" for part in parts[:-1]] + parts[-1:]


def draw_batch(
    tokens: TokenFile, mixer: Mixer, *, seed: int, step: int, first: int, windows: int, length: int, tasks: Tasks
) -> tuple[Tensor, Tensor]:
    """Inputs and targets (windows, length): `<bos>` and running text, a share of it with recall tasks in it.

    `first` is how many windows the run has read before this batch, `tasks` what its windows get.
    """
    rows = np.empty((windows, length + 1), dtype=np.int64)
    rows[:, 0] = BOS_ID
    rng = random.Random(f"mix {seed} {step}")
    for row in range(windows):
        rows[row, 1:] = mixer.mix(rng, tokens.at(first + row, length, seed), tasks)
    both = torch.from_numpy(rows)
    return both[:, :-1], both[:, 1:]


def encode_document(tokenizer: Tokenizer, file: Path) -> Ids:
    """The ids of one cleaned document, for measuring."""
    return np.array(plain_ids(tokenizer, read_document(file)), dtype=np.uint16)
