"""Offloading benchmark: its cap, one real cell of ours, what it refuses, and its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.engine.config import EngineConfig
from millpond.engine.offload.kv_size import KVSize
from millpond.engine.offload.model_size import model_size
from millpond.engine.offload.open import open_in_memory
from millpond.engine.offload.plan import ENGINE
from millpond.engine.offload.planner import EXAMPLE, Workload
from millpond_lab.bench.offload import cell, deepspeed, llamacpp, run, shapes
from millpond_lab.bench.offload.projection import growth, sizes_of
from millpond_lab.bench.offload.settings import OURS, OffloadSettings
from millpond_lab.bench.offload.table import markdown
from millpond_lab.cli.bench.offload_picture import draw

MiB = 2**20
TINY = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}

TAKES = """
import sys
from pathlib import Path
from millpond_lab.bench.offload import cap
cap.SLACK = 1 << 20
held = cap.Cap(Path(sys.argv[1]), 8 << 20, enforce=sys.argv[3] == "enforce")
import mmap, time
pages = []
for n in range(int(sys.argv[2])):
    pages.append(mmap.mmap(-1, 1 << 20))
    pages[-1].write(bytes(range(256)) * 4096)
time.sleep(0.3)
print(held.end()["most_own_bytes"])
"""


@pytest.mark.parametrize(
    ("taken", "how", "ends"), [(4, "enforce", False), (40, "enforce", True), (40, "measure", False)]
)
def test_a_process_that_takes_more_than_the_cap_is_ended(taken: int, how: str, ends: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKES, str(tmp_path), str(taken), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if ends:
        assert done.returncode
        assert "and 9,437,184 allowed" in done.stderr
    else:
        assert taken << 20 <= int(done.stdout) < (taken + 5) << 20


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_cell_of_ours_runs_one_block_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    monkeypatch.setattr(cell, "constants_for", lambda folder, disk: EXAMPLE)
    monkeypatch.setattr(cell, "Cap", lambda folder, memory: Held())
    monkeypatch.setattr(cell, "BANDWIDTH_S", 0.1)
    folder = tmp_path / "model"
    shapes.make_model(folder, "tiny")
    settings = OffloadSettings(shape="tiny", memory=18 * MiB, prompt=20, new=5, threads=1)
    for name in ("h2o", "h2o-int4-weights"):
        row = cell.run_ours(folder, name, settings)
        assert row["new_tokens"] == 5 * row["requests"]
        assert row["ledger_peak_bytes"] <= settings.memory
        assert row["tokens_per_s"] > 0 < row["predicted_tokens_per_s"]
        assert row["schedule"] in ("row", "zigzag")
        assert row["prefill_s"] + row["decode_s"] == pytest.approx(row["seconds"])
        assert 0 <= row["prefill_waited_s"] < row["prefill_s"]
    assert list((folder / "packed").glob("*.int4.weights"))
    assert cell.run_ours(folder, "h2o-int4-weights-rotated4-kv", settings)["requests"] > 0
    part = cell.run_ours(folder, "h2o", replace(settings, our_steps=2))
    assert part["projected"]
    assert part["new_tokens"] == 5 * part["requests"]
    assert part["seconds"] == pytest.approx(part["prefill_s"] + part["decode_s"])
    assert part["decode_s"] == pytest.approx(2 * part["decode_timed_s"])  # two of four steps


def test_later_steps_read_caches_that_have_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(new: int) -> KVSize:
        return cast(KVSize, SimpleNamespace(step_bytes=100 + new / 2))

    assert growth(mean, 10, 100, sequences=2, weight_bytes=600) == pytest.approx((600 + 2 * 150) / (600 + 2 * 105))
    assert growth(mean, 10, 100, sequences=0, weight_bytes=0) == 1
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    shapes.make_model(tmp_path, "tiny")
    full, h2o = (sizes_of(model_size(tmp_path), EngineConfig(**OURS[name]), 100) for name in ("full", "h2o"))
    assert full(400).step_bytes / full(10).step_bytes == pytest.approx(300 / 105, rel=0.05)
    assert h2o(400).step_bytes == h2o(10).step_bytes


@pytest.mark.parametrize("schedule", ["row", "diagonal"])
def test_a_plan_that_is_searched_for_uses_only_what_it_may(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    shapes.make_model(tmp_path / "model", "tiny")
    opened = open_in_memory(
        tmp_path / "model",
        18 * MiB,
        None,
        None,
        EngineConfig(method="full"),
        machine=EXAMPLE,
        workload=Workload(prompt=20, new=20),
        capabilities=replace(ENGINE, schedules=(schedule,)),
    )
    assert opened.placement.plan.schedule == schedule
    assert opened.streamed is not None
    opened.streamed.close()


#: In place of the script and its environment: says what it was asked, and makes the file.
PEER = """#!{python}
import json, pathlib, sys
asked = json.loads(sys.argv[2])
if asked["make"]:
    pathlib.Path(asked["file"]).write_text("")
    print(json.dumps({{}}))
elif asked["memory"] < 1000:
    sys.exit("too little memory")
else:
    print(json.dumps({{"prefill_s": len(asked["prompts"]) * 1.0, "decode_step_s": 0.5}}))
"""


def test_a_cell_of_llamacpp(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PEER.format(python=sys.executable))
    python.chmod(0o755)
    settings = OffloadSettings(shape="0.16B", prompt=8, new=5, steps=2)
    row = llamacpp.run_llamacpp(tmp_path, "q4_0", 4, settings, python)
    assert (tmp_path / "llamacpp" / "q4_0.gguf").exists()
    assert row["seconds"] == 4 + 4 * 0.5
    assert row["tokens_per_s"] == pytest.approx(20 / 6)
    with pytest.raises(RuntimeError, match="too little memory"):
        llamacpp.run_llamacpp(tmp_path, "q4_0", 4, replace(settings, memory=10), python)


class FakeDeepSpeed(ModuleType):
    """In place of DeepSpeed: gives the model back, and keeps the settings that it was given."""

    __version__ = "0"

    def __init__(self) -> None:
        super().__init__("deepspeed")
        self.__spec__ = ModuleSpec("deepspeed", None)
        self.config: dict[str, Any] = {}
        self.compatible = True
        self.loaded = 0
        self.AsyncIOBuilder = lambda: self

    def is_compatible(self) -> bool:
        return self.compatible

    def load(self) -> None:
        self.loaded += 1

    def init_distributed(self, backend: str) -> None:
        assert backend == "gloo"

    def initialize(self, *, model: Any, config: dict[str, Any]) -> tuple[Any, ...]:
        self.config = config
        if "nvme_path" in config["zero_optimization"]["offload_param"]:
            Path(config["zero_optimization"]["offload_param"]["nvme_path"], "rank0").mkdir(parents=True)
        return SimpleNamespace(module=model), None, None, None


def test_a_cell_of_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, caps = FakeDeepSpeed(), []

    def held(*args: Any, **options: Any) -> Held:
        caps.append((args, options))
        return Held()

    monkeypatch.setitem(sys.modules, "deepspeed", library)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", library)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(deepspeed, "Cap", held)
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    folder, package = tmp_path / "model", tmp_path / "package"
    shapes.make_model(folder, "tiny")
    settings = OffloadSettings(shape="tiny", memory=18 * MiB, prompt=20, new=5, threads=1, steps=3)
    row = deepspeed.run_deepspeed(folder, "host", 2, settings, package)
    assert row["requests"] == 2
    assert row["seconds"] == pytest.approx(row["prefill_s"] + 4 * row["decode_step_s"])
    assert row["tokens_per_s"] == pytest.approx(10 / row["seconds"])
    assert caps == [((folder, 18 * MiB), {"enforce": False})]
    assert library.config["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}}
    assert not library.loaded
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(package / "operators")
    assert deepspeed.run_deepspeed(folder, "nvme", 8, settings, package)["new_tokens"] == 40
    assert library.loaded == 1
    assert library.config["zero_optimization"]["offload_param"] == {
        "device": "nvme",
        "pin_memory": False,
        "nvme_path": str(folder / "deepspeed"),
        "buffer_count": 5,
        "buffer_size": 64 * 256,
        "max_in_cpu": 0,
    }
    assert library.config["zero_optimization"]["stage3_max_live_parameters"] == 2 * 64 * (2 * 64 + 2 * 32 + 3 * 256)
    assert not (folder / "deepspeed").exists()
    library.compatible = False
    with pytest.raises(RuntimeError, match="needs libaio"):
        deepspeed.run_deepspeed(folder, "nvme", 8, settings, package)


def test_buffers_take_at_most_half_of_the_memory() -> None:
    for shape, memory, buffers in (("1.04B", 512, 2), ("1.04B", 64, 2), ("0.16B", 96, 4), ("0.16B", 512, 5)):
        settings = OffloadSettings(shape=shape, memory=memory * MiB)
        config = deepspeed.config_of("nvme", Path("files"), settings)
        assert config["zero_optimization"]["offload_param"]["buffer_count"] == buffers


def test_a_cell_that_does_not_end_or_fails_is_a_row() -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert run.row_of("deepspeed-nvme-8", sleeps, 0.5) == {"cell": "deepspeed-nvme-8", "failed": "not done within 0 s"}
    assert run.row_of("h2o", [sys.executable, "-c", "import sys; sys.exit('no memory')"], None)["failed"] == "no memory"
    assert run.row_of("h2o", [sys.executable, "-c", "print('{\"cell\": 1}')"], None) == {"cell": 1}


class Held:
    """In place of a cap, which would hold the process of the tests."""

    def end(self) -> dict[str, int]:
        return {}


def test_what_is_refused(tmp_path: Path) -> None:
    for options, message in (
        (["--shape", "2B"], "unknown shape '2B'"),
        (["--cells", "h2o,h20"], "did you mean 'h2o'"),
        (["--accelerate", str(tmp_path)], "holds no package accelerate"),
        (["--cells", "llamacpp-bf16-4", "--llamacpp", str(tmp_path / "python")], "environment with llama.cpp"),
        (["--cells", "deepspeed-host-1", "--deepspeed", str(tmp_path)], "holds no package deepspeed"),
        (["--cells", "flexgen-2x8", "--flexgen", str(tmp_path)], "holds no package flexllmgen"),
    ):
        shown = CliRunner().invoke(app, ["bench", "offload", *options], env={"COLUMNS": "200"})
        assert shown.exit_code == 2
        assert message in " ".join(shown.output.split())


def test_the_table_compares_with_the_best_of_the_others(tmp_path: Path) -> None:
    row: dict[str, Any] = {"requests": 4, "decode_step_s": 1.0, "bandwidth_gb_per_s": [1.0, 1.1]}
    waited = {"waited_s": 1.0, "timed_s": 4.0}
    data = {
        "settings": asdict(OffloadSettings()),
        "model_bytes": 2_080_000_000,
        "slack_bytes": MiB,
        "hardware": "a CPU",
        "software": "torch",
        "command": "millpond bench offload",
        "packing_bytes_per_s": 3e8,
        "rows": [
            {
                "cell": "h2o",
                **row,
                "tokens_per_s": 12.0,
                "predicted_tokens_per_s": 15.0,
                "prefill_s": 2.0,
                "predicted_prefill_s": 1.0,
                "decode_s": 10.0,
                "predicted_decode_s": 10.0,
                "seconds": 12.0,
                "prefill_waited_s": 1.0,
                "decode_waited_s": 2.0,
            },
            {"cell": "accelerate-1", **row, **waited, "tokens_per_s": 1.0, "projected": True},
            {"cell": "accelerate-4", **row, **waited, "tokens_per_s": 3.0, "projected": True},
            {"cell": "accelerate-8", "failed": "taken, and allowed"},
            {"cell": "llamacpp-q4_0-4", **row, **waited, "tokens_per_s": 1.5, "projected": True},
            {
                "cell": "deepspeed-host-8",
                **row,
                **waited,
                "tokens_per_s": 1.5,
                "projected": True,
                "most_own_bytes": 2_300_000_000,
            },
            {
                "cell": "deepspeed-nvme-8",
                **row,
                **waited,
                "tokens_per_s": 1.5,
                "projected": True,
                "most_own_bytes": 537_000_000,
            },
        ],
    }
    text = markdown(json.loads(json.dumps(data)))
    assert (
        "| Millpond, H2O 20 % | 4 | 12.00 | 25% | 16.00 | 4.0 | 15.00 | 0.94 | 1.00 | 0.80 | 1.00 | 1.00 to 1.10 |"
        in text
    )
    assert "| Accelerate, disk offload, batch 4* | 4 | 3.00 | 25% | 4.00 | 1.0 |" in text
    assert "| Accelerate, disk offload, batch 8 |  | taken, and allowed |" in text
    assert "| llama.cpp, q4_0 mapped from a file, batch 4* | 4 | 1.50 | 25% | 2.00 | 0.5 |" in text
    assert (
        "| DeepSpeed ZeRO-3, all weights in host memory, batch 8, beyond the limit: 2,300 MB* | 4 | 1.50 | 25% |"
        in text
    )
    assert "| DeepSpeed ZeRO-3, weights in files, batch 8* | 4 | 1.50 |" in text
    assert "DeepSpeed and FlexGen are not ended" in text
    assert "Packing to int4: 300 MB/s" in text
    picture = draw(data, tmp_path / "offload.svg").read_text(encoding="utf-8")
    assert "Millpond, H2O 20 %" in picture
    assert "batch 4*" in picture
    assert "offload, batch 8" not in picture
    assert "beyond the limit: 2,300 MB*" in picture
