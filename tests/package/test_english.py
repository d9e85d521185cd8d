"""English of help texts, first lines of modules, docstrings, comments and messages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import millpond
from millpond.cli.app import app

PACKAGE = Path(millpond.__file__).parent
ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "benchmarks").rglob("*.py")), ROOT / "examples" / "long_document.py"]
PARTS = (".", *sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
#: Words that say little, or another thing than the field's word.
WORDS = (
    r"\b(anew|anybody|asked|beside|carried out|everybody|hand(s|ed)? over|in the place of|lets? go of|nobody|so many|"
    r"somebody|told|what leaves)\b"
)
SAYS_LITTLE = re.compile(WORDS, re.IGNORECASE)
VAGUE = re.compile(WORDS + r"|^(Of|Who)\b", re.IGNORECASE)


def helps(name: str, command: Any) -> Iterator[tuple[str, str]]:
    yield name, (command.help or "").split("\n\n")[0]
    for option in command.params:
        yield f"{name} --{option.name}", getattr(option, "help", None) or ""
    for child, below in getattr(command, "commands", {}).items():
        yield from helps(f"{name} {child}", below)


def test_help_texts_are_in_plain_words() -> None:
    found = [(name, text) for name, text in helps("millpond", typer.main.get_command(app)) if VAGUE.search(text)]
    assert found == []


@pytest.mark.parametrize("part", PARTS)
def test_first_lines_of_modules_are_in_plain_words(part: str) -> None:
    found = []
    modules = PACKAGE.glob("*.py") if part == "." else (PACKAGE / part).rglob("*.py")
    for module in sorted(modules):
        line = (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        if VAGUE.search(line) or line.startswith(("What ", "How ", "Whether ")):
            found.append((str(module.relative_to(PACKAGE)), line))
    assert found == []


#: Files whose strings are text for a model or a word list, or cards that were written with a committed model.
TEXTS = (
    "evals/data/synthetic_english.py",
    "evals/tasks/niah.py",
    "evals/tasks/recall.py",
    "models/pond/words.py",
    "train/recall/card.py",
    "train/text/card_page.py",
    "train/text/mix.py",
)
#: Packages about tasks, where a question is asked.
QUESTIONS = ("evals", "train", "models/pond", "cli/demo")


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Lines of strings and comments, without `names` in backticks and {fields} of f-strings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            for place, line in enumerate(token.string.splitlines()):
                yield token.start[0] + place, re.sub(r"`[^`]*`|\{[^{}]*\}", "", line)


def vague(line: str, *, questions: bool) -> list[str]:
    found = (match[0] for match in SAYS_LITTLE.finditer(line))
    return [word for word in found if not word.isupper() and not (questions and word.lower() == "asked")]


@pytest.mark.parametrize("part", PARTS)
def test_docstrings_comments_and_messages_are_in_plain_words(part: str) -> None:
    found = []
    modules = PACKAGE.glob("*.py") if part == "." else (PACKAGE / part).rglob("*.py")
    for module in sorted(modules):
        name = module.relative_to(PACKAGE).as_posix()
        if name not in TEXTS:
            questions = name.startswith(QUESTIONS)
            lines = prose(module.read_text(encoding="utf-8"))
            found += [(f"{name}:{at}", line) for at, line in lines if vague(line, questions=questions)]
    assert found == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_in_plain_words(script: Path) -> None:
    lines = prose(script.read_text(encoding="utf-8"))
    assert [(at, line) for at, line in lines if vague(line, questions=False)] == []


def test_a_vague_word_is_found_in_prose_and_not_in_code() -> None:
    source = 'asked = 1  # nobody\nf"{asked} of `told` entries were carried out"\n"""What was asked."""\n'
    assert [(at, vague(line, questions=False)) for at, line in prose(source) if vague(line, questions=False)] == [
        (1, ["nobody"]),
        (2, ["carried out"]),
        (3, ["asked"]),
    ]
    assert vague("What was asked.", questions=True) == []
