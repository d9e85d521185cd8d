"""Endless text: constant memory and flat step time over 100,000 tokens (slow; a million is a bench)."""

from __future__ import annotations

import os
import statistics
import time

import psutil
import pytest
import torch

import millpond as mp
from tests.helpers.matrix.models import llama

TOKENS = 100_000
BUDGET = 256


@pytest.mark.slow
@pytest.mark.parametrize("method", ["streaming", "h2o"])
def test_a_hundred_thousand_tokens(method: str) -> None:
    model = llama("gqa", torch.float32, layers=1)
    ids = torch.randint(2, 96, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    process = psutil.Process(os.getpid())
    times: list[float] = []
    with torch.inference_mode(), mp.compress(model, method=method, budget=BUDGET) as cache:
        model(ids[:, :64], cache=cache)
        for t in range(64, TOKENS):
            begin = time.perf_counter()
            logits = model(ids[:, t : t + 1], cache=cache).logits
            times.append(time.perf_counter() - begin)
            if t == 10_000:
                warm = process.memory_info().rss, cache.stats()
        assert torch.isfinite(logits).all()
        stats = cache.stats()
        assert stats.seen == [TOKENS]
        assert stats.stored == [[[BUDGET, BUDGET]]]
        assert stats.kv_bytes == warm[1].kv_bytes
        assert stats.reserved_bytes == warm[1].reserved_bytes
        assert process.memory_info().rss - warm[0] < 16 * 2**20
        cache.check_integrity()
    early, late = statistics.median(times[5_000:15_000]), statistics.median(times[-10_000:])
    assert late < 1.3 * early, f"a step took {1e6 * early:.0f} us early and {1e6 * late:.0f} us late"
