"""`millpond calibrate`: a file that the other commands take, and what is refused."""

from __future__ import annotations

from pathlib import Path

from helpers.models import needs_pond_text
from tests.cli.test_cli import FILLER, right, wrong


def test_a_file_that_generate_takes(tmp_path: Path) -> None:
    words, out = tmp_path / "words.txt", tmp_path / "pond.safetensors"
    words.write_text(FILLER * 3)
    said = right(
        "calibrate", "--text", str(words), "--out", str(out), "--bits", "4", "--windows", "1", "--length", "256"
    ).stderr
    assert "4 bits" in said
    assert out.exists()
    options = ("--method", "full", "--codec", "kvquant4", "--max-new-tokens", "3", "--prompt", FILLER)
    assert "full cache" in right("generate", *options, "--calibration", str(out)).stderr
    assert "needs tables of 3 bits" in wrong(
        "generate", "--codec", "kvquant3", "--prompt", FILLER, "--calibration", str(out)
    )
    assert "needs a calibration" in wrong("generate", *options)
    assert "give its file as --calibration" in wrong("eval", "--tasks", "recall:length=256", "--codec", "kvquant4")


@needs_pond_text
def test_a_calibration_of_another_model(tmp_path: Path) -> None:
    words, out = tmp_path / "words.txt", tmp_path / "codes.safetensors"
    words.write_text(FILLER * 3)
    right("calibrate", "--text", str(words), "--out", str(out), "--bits", "4", "--windows", "1", "--length", "256")
    options = ("--method", "full", "--codec", "kvquant4", "--max-new-tokens", "3", "--prompt", FILLER)
    assert "made for another model" in wrong("generate", *options, "--model", "pond-text", "--calibration", str(out))


def test_texts_and_bits_that_cannot_be(tmp_path: Path) -> None:
    words, out = tmp_path / "words.txt", str(tmp_path / "x.safetensors")
    assert "cannot be read" in wrong("calibrate", "--text", str(words), "--out", out)
    words.write_text(" \n")
    assert "is empty" in wrong("calibrate", "--text", str(words), "--out", out)
    words.write_text("go on and off")
    assert "4 tokens" in wrong("calibrate", "--text", str(words), "--out", out)
    assert "whole numbers" in wrong("calibrate", "--text", str(words), "--out", out, "--bits", "four")
