"""The machinery of `bench generate`: turns, medians, failures, reports, and the child process of a peer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond_lab.bench.common.machine import PeakMemory, describe_machine, storage_bytes
from millpond_lab.bench.common.report import generate_markdown, generate_table
from millpond_lab.bench.generate.candidates import (
    GenerateCandidate,
    GenerateTiming,
    ModelShape,
    default_candidates,
    draw_prompts,
    ours,
    stock,
)
from millpond_lab.bench.generate.run import QUICK, GeneratePlan, KVPress, run
from millpond_lab.peer_process import PeerError

TINY = GeneratePlan(
    shape=ModelShape(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, ffn=32, vocab=64),
    cells=((2, 200),),
    new_tokens=4,
    repeats=2,
)


def test_the_model_has_168_million_parameters() -> None:
    shape = ModelShape()
    with torch.device("meta"):
        model = shape.build()
    assert abs(model.num_parameters() - 168e6) < 0.5e6


def test_prompts_differ_by_row_and_seed() -> None:
    first, other = draw_prompts(TINY.shape, 2, 50, 0), draw_prompts(TINY.shape, 2, 50, 1)
    assert first.shape == (2, 50)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, other)
    assert torch.equal(first, draw_prompts(TINY.shape, 2, 50, 0))


@pytest.mark.slow
def test_everyone_runs_and_holds_what_is_expected() -> None:
    data = run(TINY)
    rows = {(r["name"], r["setting"]): r for r in data["results"]}
    assert len(rows) == len(default_candidates("20%")) == 13
    assert all(len(row["readings"]) == 2 and "failure" not in row for row in rows.values())
    full = rows["transformers DynamicCache", "sdpa"]["kv_bytes"]
    assert full == 2 * 2 * 203 * 16 * 2  # sequences x (key, value) x entries (but the last token's) x head_dim x bytes
    assert full <= rows["millpond full", ""]["kv_bytes"] < 1.2 * full
    assert rows["millpond h2o", "20%"]["kv_bytes"] < 0.35 * full
    assert data["peer"] == "kvpress was not requested"
    json.dumps(data)


def test_the_model_keeps_its_own_attention() -> None:
    model, prompts = TINY.shape.build(), draw_prompts(TINY.shape, 1, 20, 0)
    before = model.config._attn_implementation
    for candidate in (ours("window", "50%"), stock("static", "eager"), stock("dynamic", force_gqa=True)):
        candidate.run(model, prompts, 3)
        assert model.config._attn_implementation == before


def test_a_candidate_that_fails_is_reported_and_the_others_go_on() -> None:
    def fail(*_: object) -> GenerateTiming:
        raise RuntimeError("no such luck\nand more")

    readings = iter([GenerateTiming(9, 9, 9, None), GenerateTiming(1, 10, 100, 5), GenerateTiming(3, 30, 100, None)])
    good = GenerateCandidate("transformers DynamicCache", "sdpa", lambda *_: next(readings))
    data = run(TINY, [GenerateCandidate("bad", "", fail), good])
    bad, fine = data["results"]
    assert bad["failure"] == "RuntimeError: no such luck"
    assert (fine["prefill_s"], fine["decode_ms"], fine["peak_bytes"]) == (2, 20, 5)
    text = generate_markdown({**data, "command": "millpond bench generate"})
    assert "no such luck" in text
    assert "| transformers DynamicCache | sdpa | 2.00 | 20.0 | 1.00 x | 0.0 | 0 |" in text


def test_ratios_are_to_the_anchor_in_its_default_setting() -> None:
    row = {"prefill_s": 1.0, "kv_bytes": 0, "peak_bytes": None}
    rows = [
        {**row, "name": name, "setting": setting, "decode_ms": ms}
        for name, setting, ms in (("a", "sdpa, our layers", 5.0), ("a", "sdpa", 10.0), ("b", "", 4.0))
    ]
    assert "| b |  | 1.00 | 4.0 | 2.50 x |" in generate_table(rows, "a")


def test_the_quick_preset_is_small() -> None:
    assert QUICK.shape.width * QUICK.shape.layers <= 256
    assert sum(batch * prompt for batch, prompt in QUICK.cells) <= 1024


def test_the_command_writes_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from millpond_lab.bench.generate import run as generate

    monkeypatch.setattr(generate, "QUICK", TINY)
    monkeypatch.setattr(generate, "default_candidates", lambda budget: [ours("h2o", budget), stock("dynamic")])
    result = CliRunner().invoke(app, ["bench", "generate", "--quick", "--repeats", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "generate-quick.json").read_text())
    assert data["command"].startswith("millpond")
    assert "## Batch 2, prompt 200" in (tmp_path / "generate-quick.md").read_text()


def test_the_machine_is_described_without_names_or_paths() -> None:
    machine = describe_machine()
    assert "cores" in machine.hardware
    assert "torch" in machine.software
    assert not any("/" in str(value) for key, value in machine.as_dict().items() if key != "gpu")


def test_memory_is_of_buffers_and_counted_once() -> None:
    whole = torch.zeros(100)
    assert storage_bytes([whole[:10], whole[50:]]) == 400
    peak = PeakMemory()
    block = torch.ones(8_000_000)
    grown = peak.growth()
    assert grown is None or grown > 0.8 * block.nbytes


CHILD = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request.get("hello"): answer = {"versions": "a peer"}
    elif request["press"] == "SnapKV": answer = {"error": "ValueError: no"}
    else: answer = {"prefill_s": 1.0, "decode_ms": 2.0, "kv_bytes": len(request["prompts"]), "peak_bytes": None}
    print(json.dumps(answer), flush=True)
"""


def test_a_peer_answers_line_by_line(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    with KVPress(Path(sys.executable), script) as peer:
        data = run(TINY, [], peer)
        with pytest.raises(PeerError, match="ValueError: no"):
            peer.ask({"press": "SnapKV"})
    assert data["peer"] == "a peer"
    rows = {r["name"]: r for r in data["results"]}
    assert "ValueError: no" in rows["kvpress SnapKV"]["failure"]
    assert rows["kvpress ObservedAttention"]["kv_bytes"] == 2
    with pytest.raises(PeerError):
        peer.ask({"hello": True})


def test_a_peer_that_is_not_there_or_dies_is_skipped_with_a_reason(tmp_path: Path) -> None:
    with KVPress(tmp_path / "python", tmp_path / "child.py") as missing:
        assert "no environment" in missing.note
        assert missing.candidates(TINY) == []
    script = tmp_path / "child.py"
    script.write_text("import sys; sys.exit(1)")
    with KVPress(Path(sys.executable), script) as dead:
        assert "skipped" in dead.note
        assert dead.candidates(TINY) == []


def test_endless_text_holds_the_same_bytes_from_beginning_to_end() -> None:
    from millpond_lab.bench import stream
    from millpond_lab.bench.common.report import stream_markdown
    from tests.helpers.matrix.models import llama

    data = stream.run(llama(dtype=torch.float32), ["streaming", "h2o"], 500, 32, 0, lambda text: None)
    rows = data["results"]
    assert [r["seen"] for r in rows if r["method"] == "h2o"][-1] == 500
    assert len(rows) == 2 * stream.STAGES
    assert {r["stored"] for r in rows} == {32}
    assert len({r["kv_bytes"] for r in rows}) == 1
    text = stream_markdown({**data, "command": "test"})
    assert text.count("\n| h2o") == stream.STAGES
