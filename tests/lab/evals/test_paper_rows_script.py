"""benchmarks/quality/paper_rows.sh and its programs, small: judged texts calibrate nothing, and counts are right."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond.models.load import load_tokenizer

QUALITY = Path(__file__).parents[3] / "benchmarks" / "quality"
PROGRAM = '#!/bin/sh\n{ printf "%s\\n" "$@"; echo; } >> "$LOG"\n'
SMALL = ("--windows", "1", "--scored", "4")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two texts of words that pond-recall knows."""
    tokenizer: Any = load_tokenizer("pond-recall")
    folder = tmp_path_factory.mktemp("texts")
    paths = folder / "one.txt", folder / "two.txt"
    for seed, path in enumerate(paths):
        ids = torch.randint(20, 320, (1200,), generator=torch.Generator().manual_seed(seed))
        path.write_text(tokenizer.decode(ids.tolist()), encoding="utf-8")
    return paths


def report(name: str, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: object) -> Any:
    """What a program writes."""
    given = [name, "pond-recall", *map(str, arguments), *SMALL, "--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", [*given, "--out", str(out)])
    monkeypatch.syspath_prepend(QUALITY)  # as Python does for a script
    runpy.run_path(str(QUALITY / name), run_name="__main__")
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_rows_are_kept_apart_by_setting(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = texts
    common = ("--text", f"one={one}", "--prompt", 300)
    out = tmp_path / "rows.json"
    report("codec_texts.py", monkeypatch, out, "auto", "int4", *common)
    tiers = ("--method", "h2o", "--budget", "20%")
    report("codec_texts.py", monkeypatch, out, "auto", *common, *tiers)
    calibrated = ("--calibrate", two, "--calibration-windows", 1, "--calibration-length", 300)
    report("codec_texts.py", monkeypatch, out, "kvquant4", *common, *calibrated)
    found = report("codec_texts.py", monkeypatch, out, "auto", *common, *tiers, "--turns", 3)
    full, evicting, known, turns = found["rows"]
    assert [row["method"] for row in found["rows"]] == ["full", "h2o", "full", "h2o"]
    assert known["calibrated on"] == "1 windows of 300 tokens of two.txt"
    assert full["kl"]["auto"]["one"] == [pytest.approx(0, abs=1e-6)]
    assert 0 < full["kl"]["int4"]["one"][0] < evicting["kl"]["auto"]["one"][0]
    assert full["bytes"]["auto"] > full["bytes"]["int4"] > evicting["bytes"]["auto"]
    assert turns["kl"] != evicting["kl"]
    again = report("codec_texts.py", monkeypatch, out, "auto", *common, *tiers)
    assert len(again["rows"]) == 4


@pytest.mark.parametrize("name", ["codec_texts.py", "merge_thresholds.py"])
def test_a_judged_text_calibrates_nothing(
    name: str, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_bytes(texts[0].read_bytes())
    codecs = ("kvquant4",) if name == "codec_texts.py" else ()
    with pytest.raises(SystemExit, match=r"copy\.txt is judged, so nothing may be calibrated on it"):
        report(name, monkeypatch, tmp_path / "out", *codecs, "--text", f"one={texts[0]}", "--calibrate", copy)


def test_thresholds_of_layers_leave_what_they_leave(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = texts
    given = ("--text", f"one={one}", "--calibrate", two, "--prompt", 300)
    found = report("merge_thresholds.py", monkeypatch, tmp_path / "out.json", *given)
    layers, heads = found["rows"]
    assert heads["left"] == [pytest.approx(0.5, abs=0.01)] * len(found["eps"])
    assert heads["left in windows"] == [pytest.approx(0.5, abs=0.01)]
    assert layers["left in windows"][0] == pytest.approx(0.5, abs=0.2)
    assert len({round(share, 3) for share in layers["left"]}) > 1
    assert min(*heads["kl"], *layers["kl"]) > 0


def test_sparse_values_read_keys_and_a_share_of_values(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("1", "0.5", "0.1", "--text", f"one={texts[0]}", "--prompt", 300)
    whole, half, tenth = report("sparse_values.py", monkeypatch, tmp_path / "out.json", *given)["rows"]
    assert [whole["bytes"], half["bytes"], tenth["bytes"]] == pytest.approx([1.0, 0.75, 0.55], abs=0.002)
    assert whole["kl"]["one"][0] < 1e-6 < half["kl"]["one"][0] < tenth["kl"]["one"][0]


def test_rows_by_a_cache_are_those_by_masks(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, rows, out = f"one={texts[0]}", tmp_path / "rows.json", tmp_path / "masked.json"
    settings = ("h2o@64", "streaming@=h2o@64")
    found = report("setting_texts.py", monkeypatch, rows, *settings, "--text", text, "--prompt", 160)
    assert report("setting_texts.py", monkeypatch, rows, "h2o@64", "--text", text, "--prompt", 160) == found
    given = ["masked_kl.py", "pond-recall", "h2o@64", "--rows", str(rows), "--text", text, "--windows", "1"]
    monkeypatch.setattr(sys, "argv", [*given, "--threads", str(torch.get_num_threads()), "--out", str(out)])
    runpy.run_path(str(QUALITY / "masked_kl.py"), run_name="__main__")
    masked = json.loads(out.read_text(encoding="utf-8"))["models"]["pond-recall"]["settings"]["h2o@64"]["one"]
    own = found["models"]["pond-recall"]["settings"]["h2o@64"]["one"]
    assert masked["kl"] == pytest.approx(own["kl"], rel=0.01)
    assert masked["kept"] == [64 / 160] == own["bytes"]


def test_neighbouring_keys_are_alike_where_tokens_are_the_same(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Any = load_tokenizer("pond-recall")
    same = tmp_path / "same.txt"
    same.write_text(tokenizer.decode([40] * 200), encoding="utf-8")
    given = ("--text", f"one={texts[0]}", "--text", f"same={same}", "--prompt", 100)
    found = report("key_similarity.py", monkeypatch, tmp_path / "out.json", *given)
    own = found["models"]["pond-recall"]["texts"]
    (mixed,), (alike,) = own["one"]["beside"], own["same"]["beside"]
    assert len(mixed) == len(own["one"]["random"][0]) > 1
    assert all(one < 0.9 < other <= 1 for one, other in zip(mixed, alike, strict=True))
    assert own["same"]["random"][0] < alike, "RoPE turns keys that are further apart away from each other"


def test_the_table_of_readings_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    essay, out = QUALITY.parents[1] / "README.md", tmp_path / "table.json"
    monkeypatch.syspath_prepend(QUALITY)

    def table(*settings: str, length: int = 400) -> Any:
        given = ["reading_table.py", "pond-text", *settings, "--essay", str(essay), "--length", str(length)]
        threads = str(torch.get_num_threads())
        given += ["--contexts", "1", "--dtype", "f32", "--threads", threads, "--out", str(out)]
        monkeypatch.setattr(sys, "argv", given)
        runpy.run_path(str(QUALITY / "reading_table.py"), run_name="__main__")
        return json.loads(out.read_text(encoding="utf-8"))["settings"]

    found = table("full", "full/int4")
    more = table("full", "full/int4", "snapkv@20%")
    assert {name: more[name] for name in found} == found, "what the file has is not measured again"
    assert {name: len(row["found"]) for name, row in more.items()} == {"full": 1, "full/int4": 1, "snapkv@20%": 1}
    assert all(row["peak"][0] >= row["held"][0] > 0 for row in more.values())
    assert more["full"]["held"][0] > 1 > 0.5 > more["full/int4"]["held"][0]
    assert more["full"]["held"][0] > 1 > 0.5 > more["snapkv@20%"]["held"][0]
    with pytest.raises(SystemExit, match="has texts of another kind"):
        table("full", length=300)


def test_no_part_calibrates_on_what_it_judges(tmp_path: Path) -> None:
    for name in ("python", "millpond"):
        program = tmp_path / name
        program.write_text(PROGRAM, encoding="utf-8")
        program.chmod(0o755)
    parts = ("codecs", "tiers", "turns", "fastgen", "merging", "values", "bytes", "masks", "rules", "ladder", "endings")
    parts += ("alike", "known", "early", "obeyed")
    known = {
        "PATH": os.environ["PATH"],
        "BIN": str(tmp_path),
        "LOG": str(tmp_path / "log"),
        "OUT": "out",
        "DATA": "data",
    }
    subprocess.run([QUALITY / "paper_rows.sh", *parts], env=known, check=True, capture_output=True)
    calls = [call.splitlines() for call in (tmp_path / "log").read_text(encoding="utf-8").strip().split("\n\n")]
    asked = [call for call in calls if call[0] == "eval"]
    assert [call[call.index("--method") + 1] for call in asked if "out/endings" in call] == ["full", "h2o,streaming"]
    assert {call[call.index("--out") + 1]: call[-1] for call in asked} == {
        "out/endings": "4%,10%,20%,50%",
        "out/known-facts": "3%,6%,20%",
        "out/early": "int8_mikv,int8_mikv3,int8_mikv4",
        "out/obeyed": "int8_mikv,int8_mikv3,int8_mikv4",
    }
    calls = [call for call in calls if call not in asked]
    assert len(calls) == 21
    for call in calls:
        assert (QUALITY.parents[1] / call[0]).is_file()
        if call[0].endswith(("fastgen_persistence.py", "real_recall.py")):
            continue
        judged = [argument.partition("=")[2] for argument in call if argument.startswith(("wiki=", "novel=", "cpp="))]
        assert len(judged) == 3
        assert not any(call[place + 1] in judged for place, given in enumerate(call) if given == "--calibrate")
    results = {call[call.index("--out") + 1] for call in calls}
    assert results == {
        f"out/{name}.json"
        for name in (
            *("codec-papers", "fastgen-profiles", "fastgen-thresholds", "merge-thresholds", "sparse-values"),
            *("setting-texts", "masked-kl", "fastgen-persistence", "kvquant-ladder", "endings"),
            *("key-similarity", "known-facts", "early", "obeyed"),
        )
    }
    assert subprocess.run([QUALITY / "paper_rows.sh", "all"], env=known, check=False).returncode == 2
