"""Options that name files: every one is marked, and where only listed files may be named nothing else is opened."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest

from millpond import option_files
from millpond.codec import list_codecs, resolve
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.option_files import OptionFile, listed_files, only_listed, read_file
from millpond.registry import Option

OPTIONS = [(name, option) for name in METHODS.names() for option in METHODS.get(name).options.values()]
MARKED = [(name, option) for name, option in OPTIONS if option.is_file]
SPEAKS_OF_FILES = re.compile(r"\b(files?|paths?|folders?|director\w+|json|safetensors)\b", re.IGNORECASE)

opened: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if opened is not None and event == "open":
        opened.append(str(arguments[0]))


sys.addaudithook(_note)


@pytest.fixture
def opens() -> Iterator[list[str]]:
    """The files that are opened in a test."""
    global opened
    opened = []
    yield opened
    opened = None


def takes_text(option: Option) -> bool:
    return not option.choices and (option.annotation is str or str in get_args(option.annotation))


def label(value: object) -> str | None:
    return value.name if isinstance(value, Option) else None


def test_the_known_ones_are_marked() -> None:
    found = {f"{name}.{option.name}" for name, option in MARKED}
    assert found >= {"duo_attention.heads", "qfilters.filters", "minference.patterns"}


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=label)
def test_an_option_that_speaks_of_a_file_is_marked(name: str, option: Option) -> None:
    if takes_text(option) and SPEAKS_OF_FILES.search(f"{option.name.replace('_', ' ')} {option.help}"):
        assert option.is_file, f"{name}.{option.name} speaks of a file; mark it with FILE"
    if "path" in str(option.annotation).lower():
        assert option.is_file


@pytest.mark.parametrize("name", METHODS.names())
def test_no_option_of_any_method_opens_what_is_not_listed(
    name: str, tmp_path: Path, opens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a "/" in a path would end an option inside an option
    path = "there.json"
    Path(path).write_text("[]")
    texts = [path, *(f"{owner}/{option.name}={path}" for owner, option in MARKED)]
    opens.clear()
    for option in METHODS.get(name).options.values():
        if takes_text(option):
            for text in texts:
                with only_listed({}), suppress(OptionError):
                    METHODS.get(name)(**{option.name: text})
    assert path not in opens


@pytest.mark.parametrize("codec", list_codecs())
def test_no_codec_takes_a_file(codec: str, tmp_path: Path, opens: list[str]) -> None:
    path = str(tmp_path / "there.json")
    for name in (path, f"{codec}:{path}", (codec, path), f"{codec}+{path}"):
        with pytest.raises(OptionError):
            resolve(name)  # type: ignore[arg-type]
    assert path not in opens


def test_a_refusal_does_not_tell_whether_a_path_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.json").write_text("[[1, 0]]")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    messages = set()
    for path in ("there.json", "none.json", "folder", "pipe", "a\0b"):
        for options in ({"heads": str(path)}, {"score": f"qfilters/filters={path}"}):
            with only_listed({}), pytest.raises(OptionError) as error:
                METHODS.get("duo_attention")(**options)
            messages.add(str(error.value))
            assert str(path) not in str(error.value)
    assert len(messages) == 2


def test_listed_files_are_named_and_read_once(tmp_path: Path, opens: list[str]) -> None:
    path = tmp_path / "heads.json"
    path.write_text("[[1, 0]]")
    files = listed_files({"gates": path})
    path.unlink()
    opens.clear()
    with only_listed(files):
        for _ in range(2):
            policy = METHODS.get("duo_attention")(heads="gates")
            assert policy.heads.table == ((1.0, 0.0),)
        with pytest.raises(OptionError, match="listed are gates"):
            METHODS.get("duo_attention")(heads=str(path))
        with pytest.raises(OptionError, match=r"filters='gates' cannot be read as a \.safetensors"):
            METHODS.get("qfilters")(filters="gates")
    assert str(path) not in opens
    with pytest.raises(OptionError, match="cannot be read"):  # outside a name is a path
        METHODS.get("duo_attention")(heads="gates")


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in ("/dev/zero", pipe):
        with pytest.raises(OptionError, match="no regular file"):
            read_file(path)
    with pytest.raises(OptionError, match=r"directory|regular"):
        read_file(tmp_path)
    with pytest.raises(OptionError, match="cannot be read"):
        read_file("a\0b")
    monkeypatch.setattr(option_files, "MAX_BYTES", 10)
    (tmp_path / "long").write_bytes(b"x" * 11)
    with pytest.raises(OptionError, match="more than 10 bytes"):
        read_file(tmp_path / "long")
    (tmp_path / "short").write_bytes(b"x" * 10)
    assert read_file(tmp_path / "short") == b"x" * 10


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b"{}", b""])
def test_a_file_of_another_kind_is_a_typed_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    for name, option in MARKED:
        with pytest.raises(OptionError):
            METHODS.get(name)(**{option.name: str(path)})


def test_options_with_files_are_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    path.write_text(json.dumps([[1, 0]]))
    read = METHODS.get("duo_attention").with_files_read({"heads": str(path), "sinks": 3})
    path.unlink()
    assert isinstance(read["heads"], OptionFile)
    with only_listed({}):
        assert METHODS.get("duo_attention")(**read).heads.table == ((1.0, 0.0),)
