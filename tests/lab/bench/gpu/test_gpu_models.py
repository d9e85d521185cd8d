"""Models of the GPU benchmarks that lie in a folder, what is told of them, and cells that run on the CPU in small."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install 'millpond[gpu]')")

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks" / "gpu"))

import gpu_latency
import gpu_offload
import gpu_prompt
import gpu_served
import gpu_settings
import gpu_storage
import gpu_weights
from gpu_bench import Bench
from gpu_bounds import Rates
from gpu_machine import Machine
from gpu_shapes import kv_token_bytes, opt_6_7b, opt_30b, parameter_bytes
from transformers import AutoModelForCausalLM

import millpond as mp
from millpond.presets import PRESETS

CPU = torch.device("cpu")
RATES = Rates(1e9, 1e9, 1e9)


@pytest.fixture(scope="module")
def bench() -> Any:
    bench = Bench(Machine(interpret=True, tiny=True))
    bench.__dict__["rates"] = RATES
    return bench


def test_a_folder_has_the_weights_that_transformers_wants(tmp_path: Path) -> None:
    gpu_weights.write_random(opt_6_7b(tiny=True), tmp_path, CPU)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    layer = model.model.decoder.layers[2].requires_grad_(False)
    assert 0.01 < float(layer.fc1.weight.float().std()) < 0.03
    assert float(layer.fc1.bias.abs().max()) == 0
    assert float(layer.final_layer_norm.weight.min()) == 1
    assert len(list(tmp_path.glob("layer-*.safetensors"))) == model.config.num_hidden_layers
    with mp.LLM(tmp_path, method="full") as llm:
        (out,) = llm.generate([[5, 6, 7]], mp.SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(out.completions[0].token_ids) == 2


def test_the_bytes_are_those_of_the_published_models() -> None:
    assert 13.2e9 < parameter_bytes(opt_6_7b(tiny=False)) < 13.5e9
    assert 59.5e9 < parameter_bytes(opt_30b(tiny=False)) < 60.5e9
    assert kv_token_bytes(opt_30b(tiny=False)) == 2 * 2 * 48 * 7168


@pytest.mark.parametrize("place", ["disk", "memory of the host"])
def test_a_model_without_room_is_not_written(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    monkeypatch.setattr(gpu_weights, "write_random", lambda *given: written.append(given))
    monkeypatch.setattr(gpu_weights.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(gpu_weights, "SPARE_DISK" if place == "disk" else "SPARE_MEMORY", 1 << 60)
    monkeypatch.setattr(gpu_offload, "_WEIGHTS", gpu_weights.WeightFolder())
    case = gpu_offload.CASES["30B"][0]
    row = gpu_offload.in_process(Machine(interpret=True, tiny=True), lambda: RATES, "30B", case)
    assert f"the {place} has 0.0 GB" in row["skipped"]
    assert not written
    assert not tmp_path.exists()


def test_longer_answers_of_accelerate_follow_from_its_steps(tmp_path: Path) -> None:
    rows, name = tmp_path / "rows.jsonl", "6.7B, accelerate 4, 512 + 32"
    assert name in gpu_offload.projected_from(rows, name, 512)["skipped"]
    row = {"cell": name, "requests": 4, "prompt_s": 2.0, "step_ms": 500.0, "memory": "16GB"}
    rows.write_text(json.dumps(row | {"bound_ms": 1.0, "bound_of": "weights"}) + "\n")
    found = gpu_offload.projected_from(rows, name, 512)
    assert found["tokens_per_s"] == pytest.approx(4 * 512 / (2.0 + 512 * 0.5))
    assert found["projected"]
    assert found["bound_ms"] == 1.0


def test_offload_cells_have_names_of_their_own(tmp_path: Path) -> None:
    machine = Machine(interpret=True, tiny=True)
    machine.tiny = False
    cells = [
        cell
        for size in gpu_offload.SHAPES
        for cell in gpu_offload.offload_cells(machine, lambda: RATES, size, tmp_path)
    ]
    assert len({cell.name for cell in cells}) == len(cells)
    assert "6.7B, accelerate 4, 512 + 512, to its end" in {cell.name for cell in cells}


def test_a_model_larger_than_the_device_is_told(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        total_memory = 40 * 10**9

    monkeypatch.setattr(bench.machine, "cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Card())
    told = gpu_latency.too_large(bench, opt_30b(tiny=False), 8024)
    assert told is not None
    assert told.startswith("60.0 GB of weights and 11.0 GB of caches")
    assert gpu_latency.too_large(bench, opt_6_7b(tiny=False), 8024) is None


@pytest.mark.parametrize("name", ["full", "h2o 20%"])
def test_seconds_of_a_batch_are_its_prompts_and_steps(bench: Any, name: str) -> None:
    batch = gpu_latency.BATCHES["6.7B, 24 x 2048 + 2048"]
    row = gpu_latency.measured_latency(bench, batch, gpu_settings.SETTINGS[name])
    assert row["latency_s"] == pytest.approx(row["prompt_s"] + row["new"] * row["step_ms"] / 1e3)
    assert row["projected"].endswith("48 and 68 tokens" if name == "full" else "48 tokens")


def test_requests_that_arrive_are_as_many_as_those_that_end(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    measured = gpu_served.timed

    def noted(machine: Any, run: Any) -> float:
        spent = measured(machine, run)
        engine = getattr(run, "args", [None])[0]
        if engine is not None and hasattr(engine, "stats"):
            running.append(engine.stats().running)
        return spent

    monkeypatch.setattr(gpu_served, "timed", noted)
    row = gpu_served.sampled(bench, {"method": "full"}, 48, 8)
    before, after = running[-6:-3], running[-3:]  # plain steps before and behind the arrivals
    assert set(before) == set(after)
    assert row["share_of_bound"] == pytest.approx(row["tokens_per_s"] / row["bound_tokens_per_s"])
    assert row["projected"].startswith("a sample of 2 arrivals")


def test_a_whole_wave_is_not_projected(bench: Any) -> None:
    row = gpu_served.whole_wave(bench, {"method": "h2o", "budget": "20%"}, 48, 8)
    assert "projected" not in row
    assert row["share_of_bound"] == pytest.approx(row["tokens_per_s"] / row["bound_tokens_per_s"])


def test_transformers_reads_the_same_prompt_and_keeps_its_attention(bench: Any) -> None:
    before = bench.model.config._attn_implementation
    row = gpu_prompt.measured_transformers(bench, "eager", 48)
    assert row["first_token_s"] > 0
    assert bench.model.config._attn_implementation == before


def test_pages_of_the_storage_codec_hold_the_tokens(bench: Any) -> None:
    storage = gpu_storage.StorageBench(bench)
    assert gpu_storage.encoded(storage)["same_bytes"] == 1
    for run in (gpu_storage.decoded, gpu_storage.decoded_by_kernel):
        row = run(storage)
        assert 0 < row["squared_error"] < 0.1
        assert row["ratio"] == pytest.approx(row["bound_gb_per_s"] / row["gb_per_s"])


def test_the_setting_of_the_board_keeps_enough_and_may_be_a_preset() -> None:
    name, given, share = gpu_settings.board_setting()
    assert share >= gpu_settings.KEPT
    preset = name.split(" ")[0]
    assert preset not in PRESETS or PRESETS[preset] == given
    assert name in gpu_settings.steady_settings()
