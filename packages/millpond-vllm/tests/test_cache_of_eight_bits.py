"""Eviction beside --kv-cache-dtype fp8."""

import pytest
import torch
from vllm_helpers.engines import Engine, need_vllm
from vllm_helpers.models import prompts

need_vllm()

NEW = 24


@pytest.fixture(scope="module", params=["fp8", "fp8_e5m2"])
def engine(request, tiny_model):
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's CPU attention reads fp8 with AVX-512 or AMX alone")
    settings = {"method": "snapkv", "budget": "30%"}
    return Engine(tiny_model, settings, num_gpu_blocks_override=400, kv_cache_dtype=request.param)


def test_the_layout_reads_what_the_writer_stored(engine):
    """Numbers that 8 bits hold, written by vLLM's own writer into two blocks in a shuffled order of places."""
    state = engine.worker._state
    layer = state.layers[0]
    draw = torch.Generator().manual_seed(1)
    exact = torch.tensor([0.0, 0.5, -1.0, 1.5, -3.0, 0.25, 4.0, -6.0])
    keys, values = (exact[torch.randint(8, (64, layer.n_kv_heads, 32), generator=draw)] for _ in range(2))
    slots = torch.cat([torch.arange(7 * 32, 8 * 32), torch.arange(3 * 32, 4 * 32)])
    layer.module.impl.do_kv_cache_update(layer.module, keys, values, layer.cache, slots)
    blocks = torch.tensor([7, 3])
    stored = state.layout.read(layer.cache, blocks)
    assert stored[0].dtype == torch.uint8
    for name, part, wrote in (("keys", stored[0], keys), ("values", stored[1], values)):
        assert torch.equal(layer.decoded(name, part), wrote.transpose(0, 1))
    state.layout.write(layer.cache, torch.tensor([11, 12]), *stored)
    assert torch.equal(layer.cache[torch.tensor([11, 12])], layer.cache[blocks])


def test_requests_evict(engine):
    texts = prompts(4, 200, 400)
    outputs = engine.outputs(texts, NEW)
    assert all(one.kv_transfer_params["millpond"]["blocks_freed"] > 0 for one in outputs)
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    again = engine.tokens(texts, NEW)
    assert again == [list(one.outputs[0].token_ids) for one in outputs]


def test_keeping_everything_is_vllm_alone(engine, tiny_model):  # last: an engine that ends ends those beside it
    texts = prompts(4, 100, 400)
    got = engine.tokens(texts, NEW, [{"millpond": {"budget": None}}] * 4)
    dtype = engine.llm.llm_engine.vllm_config.cache_config.cache_dtype
    alone = Engine(tiny_model, num_gpu_blocks_override=400, kv_cache_dtype=dtype)
    assert alone.tokens(texts, NEW) == got
