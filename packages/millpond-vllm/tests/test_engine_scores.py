"""Methods with sums, moments and networks inside vLLM: the tokens are those of `mp.compress`."""

from dataclasses import replace

import pytest
import torch
from fed_state import random_heads
from transformers import LlamaForCausalLM
from vllm_helpers.engines import Engine, need_vllm
from vllm_helpers.models import prompts

import millpond as mp
from millpond.policy.trained.file import save_heads

need_vllm()

NEW = 12
METHODS = ("compactor", "expected_attention", "locret", "qfilters", "random")


@pytest.fixture(scope="module")
def model(tiny_model):
    return LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(tiny_model):
    return Engine(tiny_model, {"method": "h2o", "budget": "30%"}, num_gpu_blocks_override=200)


def events(rules, ids):
    from millpond_vllm.settings import RequestSettings

    return rules.times(len(ids), RequestSettings())


def compressed(model, rules, ids):
    """Tokens of `generate` with the budget and the newest entries that blocks make of the settings."""
    times = events(rules, ids)
    tail = len(ids) - times.left(len(ids)) * rules.block
    policy = replace(rules.policy, protect=replace(rules.policy.protect, recent=tail, grace=0), every_step=False)
    with mp.compress(model, policy, times.packed * rules.block + tail), torch.no_grad():
        return model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_compress(engine, model, method, tmp_path):
    options = {}
    if method == "locret":
        save_heads(random_heads(model), tmp_path / "heads.safetensors")
        options = {"heads": str(tmp_path / "heads.safetensors")}
    engine.use(64, method=method, budget="30%", **options)
    rules = engine.scheduler.rules
    texts = [ids for ids in prompts(8, 150, 300) if events(rules, ids).next(len(ids)) > len(ids) + NEW][:3]
    wanted = [compressed(model, rules, ids) for ids in texts]
    assert engine.tokens(texts, NEW) == wanted
    if method == "locret":  # scores of blocks that are found again
        assert engine.tokens(texts, NEW) == wanted
        assert all(one.num_cached_tokens for one in engine.outputs(texts, NEW))


def test_nothing_is_summed_where_no_event_is_ahead(engine, monkeypatch):
    """Not behind the prompt of a method that grows then, and not for a request that keeps everything."""
    engine.use(64, method="compactor", budget="30%")
    sums, calls = engine.worker._state.sums, []
    monkeypatch.setattr(sums, "gather", lambda layer, queries, step: calls.append(len(queries)))
    [ids] = prompts(1, 200, 200)
    engine.tokens([ids], NEW)
    assert len(calls) == 3 * 4, "three layers and four chunks"
    engine.tokens([ids], NEW, [{"millpond": {"budget": None}}])
    assert len(calls) == 3 * 4
