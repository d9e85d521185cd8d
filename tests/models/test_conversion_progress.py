"""A conversion says what it takes before it begins, how far it is, and afterwards what there is."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from tests.cli.test_cli import right
from tests.helpers.gguf.files import write_gguf
from tests.helpers.gguf.vocabulary import byte_pairs, pieces, write_vocabulary

from millpond.models import downloads as module
from millpond.models.downloads import progress
from millpond.models.gguf import convert
from millpond.models.gguf.quick_reader import quick_reading


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache"


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.02)
    states = iter([f"{n} of 9" for n in range(9)])
    with progress("reading [it]", lambda: next(states, "9 of 9")):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["reading [it]: 0 of 9", "reading [it]: 1 of 9"]
    with progress("writing", every_s=0.02):
        time.sleep(0.1)
    assert re.fullmatch(r"(writing: 0 s\n)+", capsys.readouterr().err)
    with progress("soon done"):
        pass
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_a_spinner_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("reading [it]", lambda: "3 of 9"):
        time.sleep(0.8)
    shown = capsys.readouterr().err
    assert "reading [it]: 3 of 9" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "\x1b" in shown


def test_a_conversion_tells_what_it_takes_and_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(module, "EVERY_S", 0.02)
    stock = convert._load

    def slowly(*args: Any) -> Any:
        time.sleep(0.1)
        made = stock(*args)
        time.sleep(0.1)
        return made

    monkeypatch.setattr(convert, "_load", slowly)
    folder = convert.converted_folder(tmp_path / "tiny.gguf")
    told = [
        line for line in capsys.readouterr().err.splitlines() if not re.fullmatch(r"Reading tiny.gguf: \d+ s", line)
    ]
    size = (folder / "model.safetensors").stat().st_size
    found = re.fullmatch(
        rf"converting tiny\.gguf to f32, once: (\d+) MB in {re.escape(str(folder.parent))}, of [\d,]+ MB that are free "
        r"there; 'millpond models list' says what was converted",
        told[0],
    )
    assert found, told
    assert int(found[1]) == round(size / 1e6)
    assert any(re.fullmatch(r".*, reading \d+ million numbers: 0 s", line) for line in told)
    assert any(re.fullmatch(r".*, reading \d+ million numbers: 21 of 21 tensors", line) for line in told)
    convert.converted_folder(tmp_path / "tiny.gguf")
    assert "once" not in capsys.readouterr().err


def test_the_list_says_what_was_converted(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    assert "tiny.gguf" not in right("models", "list").output
    folder = convert.converted_folder(path)
    convert.converted_folder(path, "bf16")
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    listed = right("models", "list").output
    file_size = f"{path.stat().st_size / 1e6:.1f}"
    facts, begin = rf"tiny\.gguf +{file_size} MB +yes +\d\.\d MB [^\n]*bf16[^\n]*", re.escape(str(path)[:30])
    assert re.search(rf"{facts}\n +{begin}", listed)
    assert f"{size:.1f} MB f32" in listed
    assert listed == right("models").output
    path.unlink()
    assert re.search(rf"tiny\.gguf no .*the file has gone; .*{re.escape(folder.parent.name)}", _joined(folder))


def _joined(folder: Path) -> str:
    """The list in one line."""
    return " ".join(right("models").output.split()).replace("/ ", "/")


def _fields(path: Path) -> Iterator[tuple[str, int, list[Any]]]:
    for name, field in gguf.GGUFReader(path).fields.items():
        first = [field.parts[i].tolist() for i in field.data[:1]]
        yield name, len(field.data), first if len(field.data) >= 1000 else [field.parts[i].tolist() for i in field.data]


def test_long_lists_are_stepped_over_and_all_else_is_read(tmp_path: Path) -> None:
    """Of strings, floats and integers; afterwards the package gguf reads as before."""
    for i, vocabulary in enumerate((byte_pairs(), pieces("llama"))):
        write_vocabulary(tmp_path / f"{i}.gguf", vocabulary)
        reader = gguf.GGUFReader
        wanted = list(_fields(tmp_path / f"{i}.gguf"))
        assert len(vocabulary.tokens) in [n for _, n, _ in wanted]
        with quick_reading():
            found = list(_fields(tmp_path / f"{i}.gguf"))
            assert (
                len(
                    {id(part) for part in gguf.GGUFReader(tmp_path / f"{i}.gguf").fields["tokenizer.ggml.tokens"].parts}
                )
                < 9
            )
        assert found == wanted
        assert gguf.GGUFReader is reader
