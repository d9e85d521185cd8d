"""A whole model through the Triton twin in the interpreter: the same tokens and kept sets as through the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import millpond as mp
from tests.helpers.matrix.models import llama, prompts

pytest.importorskip("triton", reason="needs the gpu extra: pip install 'millpond[gpu]'")

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "h2o": {"budget": 12, "sinks": 2},
    "tova": {"budget": 12},
    "streaming": {"budget": 12},
    "snapkv": {"budget": 12, "window": 4, "kernel": 3},
    "ada": {"budget": 14, "score": "h2o"},
    "random": {"budget": 12},
}


@pytest.mark.slow  # minutes in the interpreter; on a GPU benchmarks/gpu/run_all.py
@pytest.mark.parametrize("method", CASES)
def test_generate_through_triton(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, mask) = llama(dtype=torch.float32), prompts(2, length=24)
    found = []
    for kernels in ("reference", "gpu"):
        monkeypatch.setenv("MILLPOND_KERNELS", kernels)
        with mp.compress(model, method=method, page_slots=8, **CASES[method]) as cache:
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False, cache=cache)
            found.append((out.tolist(), [cache.positions(layer, s) for layer in range(2) for s in range(2)]))
    assert found[0] == found[1]
