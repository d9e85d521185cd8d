"""Documents of `pond-text`: the training and held-out parts, and the cleaning of their text.

This module knows no tokens.
"""

from __future__ import annotations

import re
from pathlib import Path

from millpond.errors import DataError

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
