"""`millpond chunks`: a folder is filled, listed, checked and emptied."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from millpond.cli.app import app

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
