"""Docstrings are complete, one parameter a line, and their first line says what the object is or does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe
import pytest

SOURCES = Path(__file__).parents[2] / "src" / "millpond"
#: Packages whose docstrings keep the rules; the list grows until it is all of `src/millpond`.
PACKAGES = (
    *("tiers", "codec", "policy", "models", "kernels", "runner", "inspector", "cluster", "cli", "server", "engine"),
    *("budget", "cpu_limit", "install_command", "option_files", "option_ranges", "optional", "presets", "presses"),
    *("registry", "scalar", "typed_json", "setting", "prompt_marks", "errors", "plugins"),
    *("cache", "hf", "methods"),
)
#: First words that do not name the subject.
RIDDLES = ("What", "Who", "Whose", "One that", "Of", "Those", "It", "Nothing", "Such", "Once", "Raises:", "Args:")
LONGEST_FIRST_LINE = 88
#: What commands and the server say of themselves; tests/formats holds it.
TEXTS = Path(__file__).parents[1] / "data" / "formats" / "texts"


def descriptions_in(document: Any) -> Iterator[str]:
    """Yield the descriptions of an OpenAPI document."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        if key == "description" and isinstance(value, str):
            yield value.split("\n")[0]
        elif isinstance(value, dict | list):
            yield from descriptions_in(value)


@cache
def shown_lines() -> frozenset[str]:
    """Return first lines that `--help` and /openapi.json show: they are worded for users."""
    commands = (TEXTS / "commands.txt").read_text(encoding="utf-8").splitlines()
    helps = (line.partition(": ")[2] for line in commands if line.startswith("== "))
    return frozenset([*helps, *descriptions_in(json.loads((TEXTS / "openapi.json").read_text(encoding="utf-8")))])


def objects_of(node: Any) -> Iterator[Any]:
    """Yield a module, its classes and functions, and those in them."""
    yield node
    for member in node.members.values():
        if not member.is_alias and member.kind.value in ("module", "class", "function"):
            yield from objects_of(member)


def documented(file: Path) -> list[Any]:
    """Return the objects of a source file that have a docstring."""
    root = griffe.visit(file.stem, file, file.read_text(encoding="utf-8"), docstring_parser=griffe.Parser("google"))
    return [node for node in objects_of(root) if node.docstring is not None]


def files_of(part: str) -> list[Path]:
    """Return the source files of a package, or of a module."""
    return sorted((SOURCES / part).rglob("*.py")) or [SOURCES / f"{part}.py"]


def parameters_of(node: Any) -> list[str] | None:
    """Return the parameters that `Args:` of a function or class must name; None where it cannot say."""
    function = node.members.get("__init__") if node.kind.value == "class" else node
    if function is None or function.is_alias or function.kind.value != "function":
        return None
    return [parameter.name for parameter in function.parameters if parameter.name not in ("self", "cls")]


def faults_of(node: Any) -> list[str]:
    """Return what is wrong with one docstring."""
    first = node.docstring.value.split("\n")[0]
    if first in shown_lines():
        return []
    faults = [f"begins with {word!r}" for word in RIDDLES if re.match(rf"{word}(?!\w)", first)]
    if node.kind.value != "module" and len(first) > LONGEST_FIRST_LINE:
        faults.append(f"first line of {len(first)} characters")
    for section in node.docstring.parsed:
        kind = section.kind.value
        if kind not in ("parameters", "attributes"):
            continue
        for entry in section.value:
            packed = re.search(r"[.;] (?!None)[a-z_]\w*: ", " ".join(entry.description.split()))
            faults += [f"{entry.name}: several parameters in one item: {packed[0]!r}"] if packed else []
        if kind == "parameters" and (expected := parameters_of(node)) is not None:
            named = [entry.name.lstrip("*") for entry in section.value]
            faults += [] if named == expected else [f"Args: names {named}, and the parameters are {expected}"]
    return faults


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_a_finished_package_keep_the_rules(package: str) -> None:
    faults = [
        f"{file}: {node.path}: {fault}"
        for file in files_of(package)
        for node in documented(file)
        for fault in faults_of(node)
    ]
    assert not faults, "\n".join(faults)


def test_lines_shown_to_users_are_known() -> None:
    assert {"Generate text from a prompt inside a KV budget.", "What went wrong."} <= shown_lines()
    assert "" not in shown_lines()


def test_faults_are_found(tmp_path: Path) -> None:
    text = """What two make.\n\n    Args:\n        a: one number. b: another one.\n    """
    (tmp_path / "bad.py").write_text(f'def pair(a: int, b: int) -> int:\n    """{text}"""\n')
    (node,) = documented(tmp_path / "bad.py")
    assert faults_of(node) == [
        "begins with 'What'",
        "a: several parameters in one item: '. b: '",
        "Args: names ['a'], and the parameters are ['a', 'b']",
    ]
