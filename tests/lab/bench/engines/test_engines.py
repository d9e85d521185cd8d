"""`bench engines`: turns over child processes, ratios, failures, the table, the command, and our own child."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.errors import OptionError
from millpond_lab.bench.common.optional_peer import OptionalPeer
from millpond_lab.bench.engines import candidates, run
from millpond_lab.bench.engines.candidates import FULL, ConversionError, EngineCandidate, Kind, Weights
from millpond_lab.bench.engines.run import EngineEntry, EnginesPlan, EngineTiming, Floor
from millpond_lab.bench.engines.table import markdown
from millpond_lab.bench.generate.candidates import ModelShape
from millpond_lab.peer_process import PeerError

BENCHMARKS = Path(__file__).parents[4] / "benchmarks" / "engines"
SHAPE = ModelShape(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, ffn=32, vocab=64)
PLAN = EnginesPlan(shape=SHAPE, cells=((2, 40), (1, 30)), new_tokens=3, repeats=2, threads=1)

#: An engine that says what it was told: `slow` is its decoding time, and `bad` a batch size that it cannot bear.
FAKE = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from engine_child import serve

class Fake:
    def __init__(self, settings):
        if settings["slow"] < 0:
            raise ValueError("no such speed\\nand more")
        self.settings = settings

    def run(self, prompts, new_tokens):
        if len(prompts) == self.settings["bad"]:
            raise MemoryError(f"{{len(prompts)}} are too many")
        print("nothing that the parent should read")
        steps = [self.settings["slow"]] * (new_tokens - 1) + [1000.0]
        held = {{"kv_bytes": len(prompts), "weight_bytes": self.settings["weight_bytes"]}}
        return {{"prefill_s": float(len(prompts[0])), "steps_ms": steps, **held}}

serve("fake 1.0", Fake)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The fake engine's script."""
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return path


def fake(
    name: str, script: Path, setting: str = "full", slow: float = 1.0, bad: int = 0, weight_bytes: int | None = None
) -> EngineCandidate:
    kind = Kind(name, Path(sys.executable), script, "nobody", lambda weights: weights.folder)
    return EngineCandidate(kind, setting, lambda *_: {"slow": slow, "bad": bad, "weight_bytes": weight_bytes})


def by_label(data: dict[str, Any], batch: int) -> dict[str, dict[str, Any]]:
    return {f"{row['name']}, {row['setting']}": row for row in data["results"] if row["batch"] == batch}


@pytest.mark.slow
def test_everyone_runs_in_turns_and_is_compared(script: Path, tmp_path: Path) -> None:
    told: list[str] = []
    everyone = [fake("millpond", script, slow=2.0, weight_bytes=10**8), fake("other", script, slow=6.0, bad=2)]
    so_far: list[int] = []
    data = run.run(PLAN, everyone, tmp_path, told.append, lambda data: so_far.append(len(data["results"])))
    assert so_far == [2, 4]  # rows after each cell
    assert data["engines"] == {"millpond": "fake 1.0", "other": "fake 1.0"}
    alone, pair = by_label(data, 1), by_label(data, 2)
    assert (alone[FULL]["decode_ms"], alone["other, full"]["decode_ms"]) == (2.0, 6.0)  # medians: the last step is slow
    assert alone["other, full"]["decode_ratio"] == 3.0
    assert alone["other, full"]["prefill_ratio"] == 1.0
    assert pair[FULL]["prefill_s"] == 40.0
    assert pair[FULL]["kv_bytes"] == 2
    assert len(pair[FULL]["readings"]) == PLAN.repeats
    rss = alone[FULL]["rss_bytes"]
    assert rss is None or 0 <= rss < 1e8
    assert pair["other, full"]["failure"] == "MemoryError: 2 are too many"
    assert sum("batch 2" in line and "turn" in line and "other" in line for line in told) == 1 + PLAN.repeats
    text = markdown({**data, "command": "millpond bench engines"})
    found = alone["other, full"]["above_floor"]
    assert f"| other | full | 30.00 | 1.00 x | 6.0 | 3.00 x | full | {found:.2f} x | 0.0 |  |" in text
    assert "| 0.0 | 100 |" in text
    read = [alone[label]["readings"][0]["floor_ms"] for label in (FULL, "other, full")]
    assert read[0] is None or read[0] > 2 * read[1], "its own bytes are read, not those of the model"
    floors = [reading["floor_ms"] for reading in alone["other, full"]["readings"]]
    assert min(6.0 / floor for floor in floors) <= found <= max(6.0 / floor for floor in floors)
    assert "MemoryError: 2 are too many" in text
    json.dumps(data)


def test_an_engine_that_cannot_load_or_is_not_there_is_skipped_with_a_reason(script: Path, tmp_path: Path) -> None:
    absent = EngineCandidate(
        Kind("absent", tmp_path / "python", script, "benchmarks/absent_env.sh", Weights.saved), "full", lambda *_: {}
    )
    broken = tmp_path / "broken.py"
    broken.write_text("import sys; sys.exit('cannot convert')")
    bad = EngineCandidate(
        Kind("bad", Path(sys.executable), script, "nobody", lambda w: w.converted("y", Path(sys.executable), broken)),
        "full",
        lambda *_: {},
    )
    data = run.run(
        EnginesPlan(shape=SHAPE, cells=((1, 8),), repeats=1), [absent, bad, fake("slow", script, slow=-1)], tmp_path
    )
    rows = {row["name"]: row for row in data["results"]}
    assert "make one with benchmarks/absent_env.sh" in rows["absent"]["failure"]
    assert rows["bad"]["failure"] == "broken.py failed: cannot convert"
    assert rows["slow"]["failure"] == "ValueError: no such speed"
    assert all(row["decode_ms"] is None and row["decode_ratio"] is None for row in rows.values())


def test_a_script_that_is_not_there_is_told(tmp_path: Path) -> None:
    with OptionalPeer("x", Path(sys.executable), tmp_path / "x.py", "nobody") as child:
        assert "root of Millpond's repository" in child.note
        with pytest.raises(PeerError, match=r"x\.py"):
            child.ask({"hello": True})


def test_an_engine_that_hangs_is_ended_and_told(tmp_path: Path) -> None:
    hanging = tmp_path / "hanging.py"
    hanging.write_text("""import time; print('{"versions": "1"}', flush=True); time.sleep(600)""")
    with OptionalPeer("x", Path(sys.executable), hanging, "nobody", timeout_s=60) as child:
        assert child.process is not None
        child.process.timeout_s = 0.2  # starting may take longer on a busy machine
        with pytest.raises(PeerError, match=r"the x process gave no reply within 0\.2 s and was ended"):
            child.ask({"load": {}})
        with pytest.raises(PeerError, match="x process"):
            child.ask({"load": {}})
    hanging.write_text("import time; time.sleep(600)")
    with pytest.raises(ConversionError, match=r"hanging\.py was not done within 0\.2 s"):
        Weights(SHAPE, 0, tmp_path, timeout_s=0.2).converted("x", Path(sys.executable), hanging)


def test_ratios_are_within_a_turn() -> None:
    def entry(times: dict[int, float]) -> EngineEntry:
        made = EngineEntry(fake("any", Path()), OptionalPeer("any", Path("/nowhere"), Path(), ""))
        made.readings = {turn: EngineTiming(ms, ms, 1, None, ms / 2) for turn, ms in times.items()}
        return made

    base, other = entry({0: 1.0, 1: 10.0, 2: 4.0}), entry({0: 2.0, 1: 20.0})  # the machine was busy in turn 1
    assert other.ratio("decode_ms", base) == 2.0
    assert other.above_floor == 2.0
    assert other.ratio("rss_bytes", base) is None
    assert other.ratio("decode_ms", None) is None
    assert other.median("rss_bytes") is None


def test_weights_are_made_once_and_named_by_shape_and_seed(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    weights = Weights(SHAPE, 3, tmp_path)
    saved = weights.saved()
    stamp = (saved / "model.safetensors").stat().st_mtime_ns
    assert weights.saved() == saved
    assert (saved / "model.safetensors").stat().st_mtime_ns == stamp
    assert Weights(SHAPE, 4, tmp_path).root != weights.root
    for name, tensor in SHAPE.build(3).named_parameters():
        assert torch.equal(load_file(saved / "model.safetensors")[name], tensor)
    copy = tmp_path / "copy.py"
    copy.write_text("import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2])")
    made = weights.converted("other", Path(sys.executable), copy)
    assert (made / "config.json").exists()
    assert weights.converted("other", tmp_path / "no python", copy) == made
    copy.write_text("raise ValueError('half way')")
    with pytest.raises(ConversionError, match=r"copy\.py failed: ValueError: half way"):
        weights.converted("third", Path(sys.executable), copy)


def test_the_floor_is_that_of_the_bytes_that_are_read() -> None:
    from millpond.kernels import native

    assert SHAPE.weight_bytes() == sum(weight.nbytes for weight in SHAPE.build().parameters())
    floor = Floor(1)
    small, large = floor.read_ms(2**12), floor.read_ms(2**27)
    assert (small is None) == (not native.is_available())
    assert small is None or (large or 0) > small


def test_everyone_is_told_the_same_share_of_the_prompt() -> None:
    mine = candidates.ours(["h2o", "ada"], ["int4"], "25%")
    assert [c.label for c in mine] == [FULL, "millpond, h2o 25%", "millpond, ada 25%", "millpond, full, int4"]
    assert mine[1].settings(4, 400, 8)["budget"] == "25%"
    full, evicting, _ = candidates.openvino(Path("python"), "25%", mine[1].label)
    assert (full.settings(4, 400, 8)["keep"], evicting.settings(4, 400, 8)["keep"]) == (0, 100)
    assert evicting.against == mine[1].label
    assert candidates.llamacpp(Path("python"))[0].settings(4, 400, 8)["room"] > 408


def test_packed_weights_are_compared_with_the_file_that_they_come_from() -> None:
    gguf = Path("some-Q4_1.gguf")
    mine = candidates.ours([], [], "25%", "int4", gguf)
    assert [c.label for c in mine] == [FULL, "millpond, full, int4 weights"]
    assert [c.settings(1, 8, 8)["weights"] for c in mine] == [None, "int4"]
    weights = Weights(SHAPE, 0, Path("nowhere"))
    assert mine[1].kind.model(weights) == gguf
    assert candidates.ours([], [], "25%", "int8")[1].kind.model == Weights.saved
    converted, as_it_is = candidates.llamacpp(Path("python"), gguf, "int4")
    assert (converted.against, as_it_is.against) == (FULL, mine[1].label)
    assert candidates.llamacpp(Path("python"), gguf)[1].against == FULL
    everyone = [*mine, converted, as_it_is]
    assert candidates.only(everyone, []) == everyone
    assert candidates.only(everyone, ["int4 weights", "some-"]) == [mine[1], as_it_is]
    with pytest.raises(OptionError, match="--only 'int5' is in no label; the candidates are millpond, full; millpond"):
        candidates.only(everyone, ["int5"])
    with pytest.raises(OptionError, match="unknown format of weights 'int5'"):
        candidates.ours([], [], "25%", "int5")


@pytest.mark.parametrize(
    "settings",
    [
        ("full", None, None, None),
        ("h2o", "25%", None, None),
        ("full", None, "int4", None),
        ("full", None, None, "int4"),
    ],
)
def test_our_own_child_decodes_all_sequences_at_each_step(
    settings: tuple[str, str | None, str | None, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    child = importlib.import_module("millpond_engine")
    monkeypatch.setattr(child.torch, "set_num_threads", lambda n: None)
    method, budget, codec, weights = settings
    shape = ModelShape(layers=1, width=64, heads=2, kv_heads=1, head_dim=32, ffn=32, vocab=64)
    engine = child.Millpond(
        {
            "model": str(Weights(shape, 0, tmp_path).saved()),
            "threads": 1,
            "method": method,
            "budget": budget,
            "codec": codec,
            "weights": weights,
            "step_tokens": 128,
        }
    )
    steps: list[int] = []
    step = engine._engine.step
    monkeypatch.setattr(engine._engine, "step", lambda: steps.append(len(out := step())) or out)
    for _ in range(2):
        del steps[:]
        answer = engine.run([[i % 64 for i in range(start, start + 300)] for start in (0, 7)], 4)
        assert len(answer["steps_ms"]) == 4
        assert steps[-5:-1] == [2, 2, 2, 2]  # and one that tells that both were cancelled
        assert answer["prefill_s"] > 0
        full = 2 * 303 * 2 * 32 * 2  # sequences x entries x (key, value) x head_dim x bytes
        low, high = (
            {"full": (1.0, 1.3), "h2o": (0.2, 0.5)}[method] if codec is None else (0.2, 0.8)
        )  # recent ones in bf16
        assert low * full <= answer["kv_bytes"] <= high * full
        most = shape.weight_bytes()
        assert answer["weight_bytes"] == most if weights is None else answer["weight_bytes"] > 0
    assert not engine._engine.busy


def test_the_command_writes_both_files(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "QUICK", PLAN)
    monkeypatch.setattr(candidates, "ours", lambda *_: [fake("millpond", script)])
    monkeypatch.setattr(candidates, "stock", lambda: [fake("transformers", script)])
    nowhere = str(tmp_path / "python")
    command = ["bench", "engines", "--quick", "--cells", "1x16", "--repeats", "1", "--folder", str(tmp_path / "models")]
    command += ["--openvino", nowhere, "--llamacpp", nowhere, "--out", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "engines-quick.json").read_text())
    names = [row["name"] for row in data["results"]]
    assert names == ["millpond", "transformers", *["OpenVINO GenAI"] * 3, "llama.cpp"]
    text = (tmp_path / "engines-quick.md").read_text()
    assert "## Batch 1, prompt 16" in text
    assert "make one with benchmarks/engines/llamacpp_env.sh" in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--cells", "4by5"], "must read BATCHxPROMPT"),
        (["--budget", "512"], "a share of the prompt"),
        (["--codec", "int5"], "int5"),
        (["--weights", "int5"], "unknown format of weights 'int5'"),
        (["--only", "nobody"], "--only 'nobody' is in no label"),
        (["--methods", "nope"], "unknown method 'nope'"),
    ],
)
def test_the_command_refuses(options: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["bench", "engines", "--quick", *options])
    assert result.exit_code == 2
    assert sentence in result.output + result.stderr
