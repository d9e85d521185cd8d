"""Groups of sliding-window and recurrent layers beside the group that evicts, without workers."""

import pytest
from vllm_helpers.engines import need_vllm
from vllm_helpers.models import prompts
from vllm_helpers.schedulers import Steps, full_spec, recurrent_spec, sliding_spec

need_vllm()

SNAPKV = {"method": "snapkv", "budget": "30%"}


def cached(steps, name):
    """Return the blocks of a request in each group."""
    return [one.req_to_blocks[name] for one in steps.scheduler.kv_cache_manager.coordinator.single_type_managers]


def test_a_hit_that_ends_early_holds_the_window_of_sliding_layers(tiny_model):
    """The window in front of the hit's end is there, and not only the one in front of the longest hit."""
    steps = Steps(tiny_model, SNAPKV, [full_spec(), sliding_spec(window=64)], 400)
    ids = prompts(1, 300, 300)[0]
    steps.add("first", ids)
    steps.run()
    steps.add("second", ids)
    output = steps.step()
    hit = output.scheduled_new_reqs[0].num_computed_tokens
    window = steps.scheduler.rules.policy.window
    assert hit == (300 - window) // 16 * 16
    full, sliding = cached(steps, "second")
    assert not any(block.is_null for block in full[: hit // 16])
    needed = range((hit - 63) // 16, hit // 16)
    assert len(needed) >= 4
    assert not any(sliding[at].is_null for at in needed), "queries at the hit's end read the window in front of it"


@pytest.mark.parametrize("ahead", [False, True], ids=["step", "ahead"])
def test_no_group_publishes_what_follows_an_eviction(tiny_model, ahead):
    groups = [full_spec(), sliding_spec(window=64)]
    steps = Steps(tiny_model, SNAPKV, groups, 400, ahead=ahead)
    request = steps.add("first", prompts(1, 300, 300)[0], new=60)
    steps.run()
    assert len(steps.tokens["first"]) == 60
    published = [block for block in steps.pool.blocks if block.block_hash is not None]
    assert published, "what is computed before the eviction is published"
    late = [block for block in published if block.block_hash_num_tokens > request.num_prompt_tokens]
    assert not late, "sliding layers computed these behind an eviction"
    assert steps.pool.get_num_free_blocks() == 399


def test_without_eviction_every_group_publishes(tiny_model):
    steps = Steps(tiny_model, {"method": "snapkv", "budget": None}, [full_spec(), sliding_spec(window=64)], 400)
    request = steps.add("first", prompts(1, 300, 300)[0], new=60)
    steps.run()
    late = [
        block
        for block in steps.pool.blocks
        if block.block_hash is not None and block.block_hash_num_tokens > request.num_prompt_tokens
    ]
    assert late


@pytest.mark.parametrize(("mode", "batch"), [("align", 256), ("align", 4096), ("none", 256)])
def test_recurrent_groups_keep_their_state_and_hits_end_before_the_window(tiny_model, mode, batch):
    groups = [full_spec(64), recurrent_spec(64, mode)]
    args = {"enable_prefix_caching": mode == "align"}
    steps = Steps(tiny_model, {"method": "snapkv", "budget": 200}, groups, 400, batch=batch, **args)
    ids = prompts(1, 660, 660)[0]
    for name in ("first", "second"):
        request = steps.add(name, ids, new=100)
        while len(steps.tokens[name]) < 50:
            steps.step()
        full, recurrent = cached(steps, name)
        assert steps.scheduler.manager.counts[name].events == 1
        assert [block.is_null for block in full[:10]].count(False) < 10
        assert not recurrent[-1].is_null
        del request
        steps.run()
    assert steps.pool.get_num_free_blocks() == 399
    hit = next(
        one.num_computed_tokens for out in steps.outputs for one in out.scheduled_new_reqs if one.req_id == "second"
    )
    window = steps.scheduler.rules.policy.window
    assert hit == ((660 - window) // 64 * 64 if mode == "align" else 0)


def test_two_groups_of_full_attention_are_refused(tiny_model):
    from millpond import UnsupportedModelError

    with pytest.raises(UnsupportedModelError, match="into 2 groups"):
        Steps(tiny_model, SNAPKV, [full_spec(), full_spec(), sliding_spec()], 400)


def test_a_model_of_sliding_layers_alone_is_refused(tiny_model):
    from millpond import UnsupportedModelError

    with pytest.raises(UnsupportedModelError, match="SlidingWindowSpec"):
        Steps(tiny_model, SNAPKV, [sliding_spec()], 400)
