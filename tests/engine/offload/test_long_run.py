"""Three hundred requests, weights four times the memory and KV more than it: what process and page cache hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.engine.long_run import NEW
from tests.helpers.hf.families import family
from tests.helpers.tiers.page_cache import cached_bytes, drop

MEMORY, N_REQUESTS = 16 << 20, 300
#: Bytes that the ledger does not count: objects of Python, what libraries allocate at their first call, threads. What
#: the imports take is measured: 391 MB with torch 2.11 and transformers 5.
BESIDE = 64 << 20


@pytest.mark.slow
def test_the_process_stays_small_over_three_hundred_requests(tmp_path: Path) -> None:
    made = family("llama").make(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=28,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        initializer_range=0.05,
    )
    folder, disk = tmp_path / "model", tmp_path / "disk"
    made.save_pretrained(folder)
    disk.mkdir()
    weights = folder / "model.safetensors"
    assert weights.stat().st_size >= 4 * MEMORY
    drop(weights)
    command = [sys.executable, "-m", "tests.helpers.engine.long_run", str(folder), str(disk)]
    done = subprocess.run(
        [*command, str(MEMORY), str(N_REQUESTS)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == []
    assert (found["ended"], found["lengths"]) == (N_REQUESTS, [NEW])
    assert found["kv"] > MEMORY
    assert found["ledger"] <= MEMORY
    assert found["resident"] - found["imported"] <= MEMORY + BESIDE
    assert found["resident"] - found["third"] <= 8 << 20, "two hundred more requests take no more"
    assert found["during"] == ["plan.json"], "files of KV have no names"
    assert [path.name for path in disk.iterdir()] == ["plan.json"]
    if not found["direct"]:
        pytest.skip("the file system has no direct reads")
    assert cached_bytes(weights) in (0, None)
