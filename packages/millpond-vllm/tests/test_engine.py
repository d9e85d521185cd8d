"""Eviction inside vLLM against a plain reference of the rule."""

import pytest
from vllm_helpers.engines import Engine, need_vllm
from vllm_helpers.models import prompts
from vllm_helpers.reference import Reference

need_vllm()

NEW = 36


@pytest.fixture(scope="module")
def engine(tiny_model):
    return Engine(tiny_model, {"method": "snapkv", "budget": "30%"}, num_gpu_blocks_override=400)


def reference(engine, path, ids, method, new=NEW, asked=None, **options):
    from millpond_vllm.settings import RequestSettings

    times = engine.scheduler.rules.times(len(ids), RequestSettings.parse(asked))
    return Reference(path, method, times, **options), times.first() <= len(ids) + new


METHODS = {"snapkv": {}, "h2o": {"sinks": 4}, "streaming": {"sinks": 4}, "tova": {"window": 1}, "keydiff": {}}


@pytest.mark.parametrize("chunk", [4096, 64], ids=["whole", "chunks"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_the_rule(engine, tiny_model, method, chunk):
    engine.use(chunk, method=method, budget="30%")
    texts = prompts(4, 40, 400)
    got = engine.tokens(texts, NEW)
    acts = 0
    for ids, tokens in zip(texts, got, strict=True):
        wanted, evicts = reference(engine, tiny_model, ids, method, **METHODS[method])
        acts += evicts
        assert tokens == wanted.generate(ids, NEW)
    assert acts >= 3, "the prompts are long enough to evict"


@pytest.mark.parametrize("method", METHODS)
def test_eviction_inside_prompts_is_that_of_the_rule(engine, tiny_model, method):
    engine.use(method=method, budget=128, prefill="chunks", chunk=128)
    texts = prompts(3, 200, 900, seed=3)
    got = engine.tokens(texts, NEW)
    for ids, tokens in zip(texts, got, strict=True):
        wanted, _ = reference(engine, tiny_model, ids, method, **METHODS[method])
        assert tokens == wanted.generate(ids, NEW)


def test_a_second_run_takes_prefixes_from_the_cache_and_is_equal(engine):
    engine.use(method="snapkv", budget="30%")
    texts = prompts(4, 200, 400, seed=5)
    first = engine.tokens(texts, NEW)
    before = engine.scheduler.kv_cache_manager.prefix_cache_stats
    assert engine.tokens(texts, NEW) == first
    outputs = engine.outputs(texts, NEW)
    assert all(one.num_cached_tokens > 100 for one in outputs), before


def test_requests_that_keep_everything_are_vllm_s_own(engine, tiny_model):
    engine.use(method="snapkv", budget="30%")
    texts = prompts(4, 100, 400, seed=7)
    kept = engine.tokens(texts, NEW, [{"millpond": {"budget": None}}] * 4)
    engine.use(method="full", budget=None)
    assert engine.tokens(texts, NEW) == kept


def test_budgets_of_requests_are_their_own(engine, tiny_model):
    engine.use(method="snapkv", budget="30%")
    texts = prompts(3, 300, 400, seed=9)
    asked = [{"millpond_budget": "50%"}, {"millpond": {"budget": 96}}, None]
    outputs = engine.outputs(texts, NEW, asked)
    figures = [one.kv_transfer_params["millpond"] for one in outputs]
    assert figures[0]["entries_kept"] > figures[2]["entries_kept"] > 0
    assert figures[1]["entries_kept"] == 64
    for ids, output, ask in zip(texts, outputs, asked, strict=True):
        wanted, _ = reference(engine, tiny_model, ids, "snapkv", asked=ask)
        assert list(output.outputs[0].token_ids) == wanted.generate(ids, NEW)


def test_kept_spans_stay(engine):
    engine.use(method="streaming", budget=96, sinks=0)
    [ids] = prompts(1, 400, 400, seed=11)
    plain = engine.tokens([ids], 8)
    kept = engine.tokens([ids], 8, [{"millpond_keep": [100, 110, 200, 203]}])
    assert plain != kept


def test_the_output_projection_is_found_for_a_score_inside_another(engine):
    engine.use(method="chunkkv", budget="30%", score="criticalkv")
    outputs = engine.outputs(prompts(2, 200, 400, seed=12), 4)
    assert all(one.kv_transfer_params["millpond"]["blocks_freed"] > 0 for one in outputs)


def test_a_preempted_request_gives_what_an_undisturbed_one_gives(tiny_model, monkeypatch):
    engine = Engine(tiny_model, {"method": "snapkv", "budget": "20%"}, num_gpu_blocks_override=24, max_model_len=600)
    texts = prompts(6, 150, 300, seed=13)
    one_by_one = [engine.tokens([ids], 200)[0] for ids in texts]
    preempted, preempt = [], engine.scheduler._preempt_request

    def counted(request, *args, **kwargs):
        preempted.append(request.request_id in engine.scheduler.manager.events)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", counted)
    assert engine.tokens(texts, 200) == one_by_one
    assert any(preempted), "requests that have evicted are preempted in so small a pool"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_200_requests_that_keep_everything_equal_stock(tiny_model, dtype):
    texts = prompts(200, 20, 300, seed=17)
    stock = Engine(tiny_model, dtype=dtype, num_gpu_blocks_override=300).tokens(texts, 24)
    ours = Engine(tiny_model, {"method": "snapkv", "budget": None}, dtype=dtype, num_gpu_blocks_override=300)
    assert ours.tokens(texts, 24) == stock


def test_a_prompt_of_four_pools_answers(tiny_model):
    engine = Engine(
        tiny_model,
        {"method": "snapkv", "budget": 256, "chunk": 256},
        num_gpu_blocks_override=33,
        max_num_batched_tokens=512,
    )
    [ids] = prompts(1, 4000, 4000, seed=15)
    assert len(ids) > 3.9 * 32 * 32
    tokens = engine.tokens([ids], NEW)[0]
    wanted, _ = reference(engine, tiny_model, ids, "snapkv")
    assert tokens == wanted.generate(ids, NEW)
