"""`millpond chunks`: a folder is filled, listed, checked and emptied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millpond.cache.chunks.store import ChunkStore
from millpond.cli.app import app
from millpond.cli.chunk_options import ChunkChoice

TEXT = "anna kettle and river\n\nquiet rain past the meadow\n\nold stone on the river\n"


def run(*arguments: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["chunks", *map(str, arguments)])
    return found.exit_code, found.output


def test_a_folder_of_chunks(tmp_path: Path) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "store"
    text.write_text(TEXT)
    code, said = run("add", folder, text, "--paragraphs", "--model", "pond-recall")
    assert (code, "3 chunks, 3 of them new" in said) == (0, True)
    assert "3 chunks, 0 of them new" in run("add", folder, text, "--paragraphs", "--model", "pond-recall")[1]
    said = run("ls", folder)[1]
    assert "3 files" in said
    assert said.count("1 parts") == 3
    assert run("check", folder) == (0, "3 files, 0 bad\n")

    bad = sorted(folder.glob("??/*/*"))[1]
    bad.write_bytes(bad.read_bytes()[:-5])
    code, said = run("check", folder)
    assert (code, bad.name in said, "3 files, 1 bad" in said) == (1, True, True)
    assert "1 files removed" in run("rm", folder, "--bad")[1]
    key = sorted(folder.glob("??/*"))[0].name
    assert "1 files removed" in run("rm", folder, key[:12])[1]
    assert "1 files removed" in run("rm", folder, "--all")[1]
    assert run("ls", folder)[0] == 2


def test_alpha_is_fitted_to_texts(tmp_path: Path) -> None:
    files = [tmp_path / f"{who}.txt" for who in ("anna", "peter", "maria")]
    for file in files:
        file.write_text(f"{file.stem} kettle " + "quiet rain past meadow and old stone " * 3)
    options = ("--model", "pond-recall", "--prompts", 1, "--chunks", 2, "--question", 4)
    code, said = run("tune-alpha", *files, "--kl", 0.5, *options)
    assert (code, "of chunks computed" in said, "ChunkStore(alpha=" in said) == (0, True, True)
    code, said = run("tune-alpha", *files[:2], *options)
    assert (code, "need more than 2 texts" in said) == (2, True)


def test_what_is_refused(tmp_path: Path) -> None:
    assert "is no chunk store" in run("ls", tmp_path / "nothing")[1]
    assert "give either keys of chunks" in run("rm", tmp_path)[1]
    assert "cannot be read" in run("add", tmp_path / "s", tmp_path / "nothing.txt")[1]
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    assert "hold no text" in run("add", tmp_path / "s", empty)[1]


#: Flags of a store on the command line, and its attributes.
FLAGS = {
    "--chunk-variants": (2, "variants"),
    "--chunk-keep-above": (0.2, "keep_above"),
    "--chunk-alpha": (0.3, "alpha"),
    "--chunk-focus": (3, "focus"),
    "--chunk-coverage": (0.75, "coverage"),
    "--chunk-dtype": ("int8", "dtype"),
    "--chunk-rule": ("craft", "rule"),
    "--chunk-load-timeout": (3.5, "load_timeout_s"),
}


def engine_commands(tmp_path: Path) -> dict[str, list[str]]:
    """Commands that open an engine with a chunk store."""
    requests = tmp_path / "requests.jsonl"
    requests.write_text("")
    return {"serve": [], "batch": [str(requests), "--out", str(tmp_path / "answers.jsonl")]}


@pytest.mark.parametrize("command", ["serve", "batch"])
def test_flags_reach_the_store(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened(Exception):
        """Instead of a model."""

    seen: list[ChunkStore] = []

    def opened(_: Any, config: Any, **__: Any) -> None:
        seen.append(config.chunk_store)
        raise Opened

    monkeypatch.setattr("millpond.engine.async_llm.AsyncLLM.__init__", lambda _, *given, **more: opened(*given, **more))
    flags = [text for flag, (value, _) in FLAGS.items() for text in (flag, str(value))]
    arguments = [command, *engine_commands(tmp_path)[command], "--chunk-store", str(tmp_path / "store")]
    done = CliRunner().invoke(app, [*arguments, "--chunk-memory", "1MiB", "--chunk-disk", "2MiB", *flags])
    assert isinstance(done.exception, Opened), done.output
    (store,) = seen
    assert {name: getattr(store, name) for _, name in FLAGS.values()} == {name: value for value, name in FLAGS.values()}
    assert (store.memory, store.disk) == (2**20, 2**21)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--chunk-variants", "0", "variants=0 of a chunk: must be at least 1"),
        ("--chunk-keep-above", "1.5", "keep_above=1.5 must be a CFO, from 0 to 1"),
        ("--chunk-keep-above", "nan", "keep_above=nan must be a CFO"),
        ("--chunk-alpha", "0", "alpha=0.0 must be a number above 0"),
        ("--chunk-alpha", "inf", "alpha=inf must be a number above 0"),
        ("--chunk-focus", "-1", "focus=-1 must be a number of layers"),
        ("--chunk-coverage", "0", "coverage=0.0 must be a share above 0"),
        ("--chunk-coverage", "nan", "coverage=nan must be a share above 0"),
        ("--chunk-load-timeout", "0", "load_timeout_s=0.0 must be a number of seconds above 0"),
        ("--chunk-rule", "lrv", "did you mean 'lru'"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "batch"])
def test_a_value_out_of_range_is_refused_before_a_model_is_read(
    command: str, flag: str, value: str, words: str, tmp_path: Path
) -> None:
    arguments = [command, *engine_commands(tmp_path)[command], "--model", "no-such-model", flag, value]
    done = CliRunner().invoke(app, [*arguments, "--chunk-store", str(tmp_path / "store")])
    assert (done.exit_code, words in done.stderr) == (2, True), done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "store").exists()
    alone = CliRunner().invoke(app, arguments)
    assert (alone.exit_code, f"{flag} needs --chunk-store" in alone.stderr) == (2, True)


def test_the_defaults_of_the_flags_are_those_of_the_store(tmp_path: Path) -> None:
    assert ChunkChoice().store() is None
    made, usual = ChunkChoice(chunk_store=tmp_path).store(), ChunkStore(tmp_path)
    names = ("memory", "disk", *(name for _, name in FLAGS.values()))
    assert [getattr(made, name) for name in names] == [getattr(usual, name) for name in names]
