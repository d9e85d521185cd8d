"""The process grows by no more than its caches may hold and a constant, however many requests come."""

from __future__ import annotations

import warnings

import pytest

import millpond as mp
from millpond_lab.bench.common.machine import PeakMemory
from tests.helpers.engine.helpers import prompt
from tests.helpers.hf.families import shared_model

REQUESTS = 1000
KV_MEMORY = 2 * 2**20
#: Bytes beside the caches: tensors of one step, work spaces of kernels, and what the allocator keeps of them.
BESIDE = 32 * 2**20


@pytest.mark.slow
def test_a_thousand_requests() -> None:
    prompts = [prompt(20 + i % 40) for i in range(REQUESTS)]
    params = [mp.SamplingParams(max_tokens=1 + i % 6, temperature=0) for i in range(REQUESTS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        with mp.LLM(shared_model("llama"), method="h2o", budget="30%", kv_memory=KV_MEMORY, prefix_cache=True) as llm:
            llm.generate(prompts[:40], params[:40])  # the threads are there, and what is loaded at first use
            memory = PeakMemory()
            outputs = llm.generate(prompts, params)
            growth = memory.growth()
    assert [len(out.completions[0].token_ids) for out in outputs] == [one.max_tokens for one in params]
    assert llm.stats().kv_reserved == 0
    if growth is None:
        pytest.skip("the system does not tell how much memory a process holds")
    assert growth <= KV_MEMORY + BESIDE
