"""Sequences of the GPU benchmarks that decode behind one prompt: pages of their own, with the tokens of one alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install 'millpond[gpu]')")

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks" / "gpu"))

import gpu_bench
import gpu_engine
from gpu_bounds import Rates
from gpu_machine import Machine
from gpu_settings import steady_settings


@pytest.fixture(scope="module")
def bench() -> Any:
    bench = gpu_bench.Bench(Machine(interpret=True, tiny=True))
    bench.__dict__["rates"] = Rates(1e9, 1e9, 1e9)
    return bench


@pytest.mark.parametrize("name", steady_settings())
def test_copies_share_no_page(bench: Any, name: str) -> None:
    with bench.engine(steady_settings()[name], 3) as engine:
        gpu_bench.decode_alike(bench, engine, gpu_bench.Shape(3, 200), 6)
        cache, _ = engine.cache_of("0")
        assert cache.n_seq == 3
        assert all(part.page_lists.n_shared() == 0 for layer_cache in cache.layers for part in (layer_cache.table,))
        engine.check_integrity()
        (output,) = engine.drain()
    one, *others = [completion.token_ids for completion in output.completions]
    assert len(one) == 6
    assert all(other == one for other in others)


def test_more_answers_than_a_request_may_have_are_of_several(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "MOST_ANSWERS", 2)
    with bench.engine({"method": "full"}, 5) as engine:
        held = gpu_bench.decode_alike(bench, engine, gpu_bench.Shape(5, 200), 6)
        caches = [engine.cache_of(name)[0] for name in ("0", "2", "4")]
        tables = [layer.table for cache in caches for layer in cache.layers]
        assert all(table.page_lists.n_shared() == 0 for table in tables)
        assert all(int(cache.used_bytes(cache.held()).min()) >= held > 0 for cache in caches)
        outputs = engine.drain()
    assert sorted(len(output.completions) for output in outputs) == [1, 2, 2]
    assert len({completion.token_ids[:6] for output in outputs for completion in output.completions}) == 1


def test_a_step_s_bytes_are_weights_and_what_caches_hold(bench: Any) -> None:
    row = gpu_engine.measured_step(bench, {"method": "full"}, gpu_bench.Shape(3, 64))
    config = bench.model.config
    each = 64 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 2
    weights = sum(p.nbytes for p in bench.model.parameters()) - bench.model.get_input_embeddings().weight.nbytes
    assert row["kv_bytes_each"] == each
    assert row["bytes"] == weights + 3 * each
