"""Benchmarks of attention over codes: rows, ratios, targets, and generate() with codecs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.errors import MillpondError
from millpond.kernels.native import library
from millpond_lab.bench.common.report import kernels_markdown
from millpond_lab.bench.generate import candidates
from millpond_lab.bench.generate.candidates import ModelShape, coded_candidates, draw_prompts, quanto
from millpond_lab.bench.generate.run import GeneratePlan
from millpond_lab.bench.kernels import quantized_decode
from millpond_lab.bench.kernels.attention import KernelRow
from millpond_lab.bench.kernels.quantized_decode import TARGETS, AttentionCase, decode_rows, packing_rows, paired_ratios

SHAPE = ModelShape(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, ffn=32, vocab=64)
needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")


def test_a_model_reads_more_than_a_cache_holds() -> None:
    small, large = AttentionCase(64, 4, 4, 1), AttentionCase(128, 8, 1, 8)
    assert small.n_layers * small.bf16_bytes >= quantized_decode.BEYOND_CACHES
    assert large.n_layers == 1
    assert (str(small), str(large)) == ("D=64 GQA 4:1 1 x 4096", "D=128 MHA 8 x 4096")


def test_ratios_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(quantized_decode.time, "perf_counter", lambda: clock[0])

    def takes(seconds: float):  # type: ignore[no-untyped-def]
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    measured = paired_ratios({"a": takes(6.0), "b": takes(2.0)}, "a", 3)
    assert measured == {"a": (6.0, 1.0), "b": (2.0, 3.0)}


@needs_native
def test_every_codec_has_a_row_and_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_decode, "BEYOND_CACHES", 2**20)
    rows = decode_rows(1, [AttentionCase(64, 1, 2, 1, 512)])
    assert [row.name.rpartition(" ")[2] for row in rows] == ["bf16", *TARGETS]
    assert rows[0].verdict == ""
    assert all(row.verdict for row in rows[1:])
    int4, int2 = (next(row for row in rows if row.name.endswith(name)) for name in ("int4", "int2"))
    assert int2.target is not None
    assert int2.target >= int4.share
    packing = packing_rows(1, 512)
    named = [(row.name.split()[0], row.name.split()[-1]) for row in packing]
    assert named == [(what, codec) for codec in (*TARGETS, "kvquant4") for what in ("packing", "reading")]
    assert all(row.share > 0 for row in packing)


def test_a_target_holds_or_is_missed() -> None:
    rows = [
        KernelRow("a", 1.0, 0.0, 2.0, "bf16", 1.6),
        KernelRow("b", 1.0, 0.0, 1.5, "bf16", 1.6),
        KernelRow("c", 1.0, 0.0, 1.0, "b"),
    ]
    assert [row.verdict for row in rows] == ["holds (160%)", "missed (160%)", ""]
    data = {"hardware": "h", "software": "s", "command": "c", "rounds": 1}
    results = [{**vars(row), "verdict": row.verdict} for row in rows]
    assert "| b | 1.000 |  | 150% | bf16 | missed (160%) |" in kernels_markdown({**data, "results": results})


@pytest.mark.slow
def test_codecs_through_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from millpond_lab.bench.generate import run

    def missing(*_: object, **__: object) -> None:
        raise ImportError("You need to install optimum-quanto")

    monkeypatch.setattr(candidates, "QuantizedCache", missing)
    monkeypatch.setattr(run, "QUICK", GeneratePlan(shape=SHAPE, cells=((1, 200),), new_tokens=4, repeats=1))
    command = ["bench", "generate", "--quick", "--codec", "int4,int8", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "generate-codecs-quick.json").read_text())
    held = {row["setting"]: row["kv_bytes"] for row in data["results"]}
    assert list(held) == ["bf16", "int4", "int8", "quanto int4"]
    assert held["int4"] < held["int8"] < held["bf16"]
    text = (tmp_path / "generate-codecs-quick.md").read_text()
    assert "| quanto int4 | ImportError: You need to install optimum-quanto |" in text
    assert "1.00 x" in next(line for line in text.splitlines() if line.startswith("| millpond full | bf16"))


def test_a_cache_of_codes_holds_what_its_parts_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    class Codes:
        def __init__(self) -> None:
            self._data, self._scale = torch.zeros(100, dtype=torch.uint8), torch.zeros(10, dtype=torch.bfloat16)

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["_data", "_scale"], None

    def cache(backend: str, config: object, nbits: int) -> DynamicCache:
        assert (backend, nbits) == ("quanto", 2)
        made = DynamicCache(config=config)
        for layer in made.layers:
            layer._quantized_keys, layer._quantized_values = Codes(), Codes()
        return made

    monkeypatch.setattr(candidates, "QuantizedCache", cache)
    reading = quanto("int2").run(SHAPE.build(), draw_prompts(SHAPE, 1, 20, 0), 4)
    assert reading.kv_bytes == 2 * (100 + 20) + 2 * 23 * 16 * 2  # codes and scales; all entries but the last


def test_an_unknown_codec_is_refused_before_anything_runs() -> None:
    with pytest.raises(MillpondError, match="int5"):
        coded_candidates(["int5"])
