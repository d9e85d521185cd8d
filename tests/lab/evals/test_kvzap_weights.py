"""Retaining heads in the form of kvpress's KVzapPress: the file that it loads, and the same order."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "peers" / "kvzap_weights.py"


def test_the_order_is_nearly_that_of_the_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    folder = tmp_path / "nvidia" / "KVzap-mlp-pond-recall"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert {name: config[name] for name in ("input_dim", "hidden_dim", "output_dim", "n_modules")} == {
        "input_dim": 192,
        "hidden_dim": 384,
        "output_dim": 2,
        "n_modules": 5,
    }
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes["layers.4.0.weight"] == (384, 192)
    assert shapes["layers.0.2.weight"] == (2, 384)
    assert len(shapes) == 20
    share = float(capsys.readouterr().out.split(": ")[1].split(" ")[0])
    assert share > 0.95
