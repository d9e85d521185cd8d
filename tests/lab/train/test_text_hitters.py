"""`millpond train heavy-hitters` and `millpond train text`, from the command line to the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond_lab.cli.train.heavy_hitters import BEGIN, END
from millpond_lab.markdown import one_per_line
from millpond_lab.train.text import recipe
from tests.helpers.train.text_tiny import TINY, write_corpus

HELD_OUT = "gutenberg/great_expectations.txt"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def model(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few steps, trained from the command line."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recipe.PRESETS, "tiny", TINY)
        options = [
            "--out",
            str(folder),
            "--data",
            str(corpus),
            "--preset",
            "tiny",
            "--max-steps",
            "3",
            "--threads",
            "1",
        ]
        done = CliRunner().invoke(app, ["train", "text", *options, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "384 of 1,600 tokens" in done.output
    return folder


def test_the_table_and_the_picture(corpus: Path, model: Path, tmp_path: Path) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "images" / "hitters.png"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    done = _measure(corpus, model, page, picture)
    assert done.exit_code == 0, done.output
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert one_per_line(text) == text
    rows = re.findall(r"^\| (\S+) \| ([\d.]+)% .*\| ([\d.]+)% .*\| ([\d.]+)% .*\| ([\d.]+)% ", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1", "**all**"]
    assert all(float(small) < float(large) <= 100 for _, small, large, *_ in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_page_without_a_place_for_the_table(corpus: Path, model: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here", encoding="utf-8")
    done = _measure(corpus, model, page, tmp_path / "x.png")
    assert done.exit_code == 2
    assert BEGIN in " ".join(done.output.split())
    assert page.read_text(encoding="utf-8") == "nothing here"
    assert not (tmp_path / "x.png").exists()


def _measure(corpus: Path, model: Path, page: Path, picture: Path):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(
        app,
        [
            "train",
            "heavy-hitters",
            "--model",
            str(model),
            "--text-file",
            str(corpus / HELD_OUT),
            "--length",
            "64",
            "--windows",
            "2",
            "--page",
            str(page),
            "--picture",
            str(picture),
        ],
    )
