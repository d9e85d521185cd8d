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


def test_a_transform_file_and_a_text_stored_with_it(tmp_path: Path) -> None:
    words, out, text = tmp_path / "words.txt", tmp_path / "pond.safetensors", str(tmp_path / "text.kv")
    words.write_text(FILLER * 12)
    own = ("calibrate", "--codec", "transform", "--text", str(words), "--out", str(out), "--length", "256")
    said = right(*own, "--no-default-text").stderr
    assert "layers" in said
    assert "tokens" in said
    assert not out.with_name("pond.safetensors.resume").exists()
    stored = ("remember", text, "--prompt", FILLER * 2, "--storage-codec", "transform:2")
    assert "make one with 'millpond calibrate --codec transform" in wrong(*stored)
    said = right(*stored, "--calibration", str(out)).stderr
    assert "tokens read" in said
    answer = right("ask", text, FILLER[:20], "--max-new-tokens", "2").stdout
    moved = tmp_path / "moved.safetensors"
    out.rename(moved)
    assert "cannot be read" in wrong("ask", text, FILLER[:20], "--max-new-tokens", "2")
    assert right("ask", text, FILLER[:20], "--max-new-tokens", "2", "--calibration", str(moved)).stdout == answer
    given = (*stored, "--calibration", str(moved))
    assert "tokens read" in right(*given, "--method", "snapkv", "--budget", "50%").stderr
    assert right("ask", text, FILLER[:20], "--max-new-tokens", "2").stdout
    assert "method 'cam': this method merges entries" in wrong(*given, "--method", "cam")
    assert "has codes already" in wrong(*given, "--method", "full", "--codec", "int8")


def test_options_of_the_other_codec(tmp_path: Path) -> None:
    out = str(tmp_path / "x.safetensors")
    assert "--bits is no option of codec transform" in wrong(
        "calibrate", "--codec", "transform", "--out", out, "--bits", "2"
    )
    assert "--most-bits is no option of codec kvquant" in wrong("calibrate", "--out", out, "--most-bits", "2")
    assert "give --text once" in wrong("calibrate", "--out", out)
    assert "leaves nothing to read" in wrong("calibrate", "--codec", "transform", "--out", out, "--no-default-text")
    assert "unknown codec to calibrate" in wrong("calibrate", "--codec", "kvtc", "--out", out)
    assert "transform:BITS" in wrong("remember", out, "--prompt", FILLER, "--storage-codec", "int4")
