"""Models with layers of several kinds evict in those of full attention, and answer as the library does."""

import pytest
from vllm_helpers.engines import Engine, need_vllm
from vllm_helpers.hybrids import compressed, gemma3, gpt_oss
from vllm_helpers.models import prompts

need_vllm()

NEW = 24
MODELS = {"gemma3": gemma3, "gpt-oss": gpt_oss}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return MODELS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, {"method": "snapkv", "budget": "30%"}, num_gpu_blocks_override=400)


@pytest.mark.parametrize("method", ["snapkv", "keydiff", "criticalkv"])
def test_tokens_are_those_of_the_library(engine, model, method):
    engine.use(method=method, budget="30%")
    texts = prompts(5, 200, 400)
    got = engine.tokens(texts, NEW)
    assert engine.scheduler.manager.total.events >= 5
    want = [compressed(model, engine.scheduler.rules, ids, NEW) for ids in texts]
    assert got == want
    full = engine.tokens(texts, NEW, [{"millpond": {"budget": None}}] * 5)
    assert full != got, "eviction acts on these texts"


def test_a_second_run_takes_prefixes_from_the_cache_and_is_equal(engine):
    engine.use(method="snapkv", budget="30%")
    texts = prompts(4, 200, 400, seed=2)
    first = engine.tokens(texts, NEW)
    outputs = engine.outputs(texts, NEW)
    assert [list(one.outputs[0].token_ids) for one in outputs] == first
    window = engine.scheduler.rules.policy.window
    hits = [(len(ids) - window) // 32 * 32 for ids in texts]
    assert [one.num_cached_tokens for one in outputs] == hits


def test_keeping_everything_is_vllm_alone(model, engine):
    engine.use(method="snapkv", budget=None)
    texts = prompts(6, 40, 400, seed=3)
    got = engine.tokens(texts, NEW)
    alone = Engine(model, num_gpu_blocks_override=400)
    assert alone.tokens(texts, NEW) == got
