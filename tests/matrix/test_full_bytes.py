"""What a full cache would hold means one thing everywhere: the model's dtype, without pages."""

from __future__ import annotations

import pytest
import torch

import millpond as mp
from millpond.engine.llm import LLM
from millpond.engine.sampling.params import SamplingParams
from millpond.server.usage import sums
from tests.engine.test_model_step import wide

TOKENS = list(range(2, 90)) * 2
#: layers x KV heads x (keys and values) x channels of `wide`.
NUMBERS = 2 * 2 * 2 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["auto", "bf16", "int8", "int2", "rotated4"])
def test_every_door_counts_a_full_cache_in_the_models_dtype(codec: str, dtype: torch.dtype) -> None:
    model = wide("llama").to(dtype)
    with torch.no_grad(), mp.compress(model, "full", codec=codec) as cache:
        model(torch.tensor([TOKENS]), cache=cache)
        stats = cache.stats()
    assert stats.full_kv_bytes == len(TOKENS) * NUMBERS * dtype.itemsize
    with LLM(model, method="full", codec=codec) as llm:
        (answer,) = llm.generate([TOKENS], SamplingParams(max_tokens=2))[0].completions
    wide("llama").float()
    assert answer.kv is not None
    assert answer.kv.full_kv_bytes == answer.kv.seen * NUMBERS * dtype.itemsize
    told = sums([answer.kv])
    assert (told["full_kv_bytes"], told["unused_bytes"]) == (answer.kv.full_kv_bytes, answer.kv.unused_bytes)


@pytest.mark.parametrize("codec", ["auto", "int4"])
def test_what_pages_take_beyond_their_entries_is_told(codec: str) -> None:
    model = wide("llama")
    with torch.no_grad(), mp.compress(model, "full", codec=codec, page_slots=16) as cache:
        model(torch.tensor([TOKENS[:33]]), cache=cache)
        stats = cache.stats()
    if codec == "auto":  # 33 entries in three pages of 16
        assert (stats.kv_bytes, stats.unused_bytes) == (48 * NUMBERS * 4, 15 * NUMBERS * 4)
        assert stats.kv_bytes - stats.unused_bytes == stats.full_kv_bytes
    assert 0 < stats.unused_bytes < stats.kv_bytes
    with LLM(model, method="full", codec=codec) as llm:
        (answer,) = llm.generate([TOKENS[:33]], SamplingParams(max_tokens=2))[0].completions
    assert answer.kv is not None
    assert 0 < answer.kv.unused_bytes < answer.kv.kv_bytes
