"""Events for which no block is free, without workers: somebody is preempted, and everybody ends."""

import pytest
from vllm_helpers.engines import need_vllm
from vllm_helpers.models import prompts
from vllm_helpers.schedulers import Steps, full_spec

need_vllm()

BLOCK = 16


def ended(steps, **new):
    """Assert that each request got its tokens, and that every block is free and in nobody's hand."""
    assert {name: len(tokens) for name, tokens in steps.tokens.items()} == new
    pool = steps.pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
    assert not steps.scheduler.manager.events
    assert not steps.scheduler.manager.times


@pytest.mark.parametrize("ahead", [False, True], ids=["step", "ahead"])
def test_originals_that_another_shares_are_taken_once_it_is_preempted(tiny_model, ahead):
    """All blocks of the first are shared with the second, and none is free: the second is preempted."""
    ids = prompts(1, 320, 320)[0]
    steps = Steps(tiny_model, {"method": "snapkv", "budget": "30%"}, [full_spec(BLOCK)], 1 + 22, ahead=ahead)
    first, second = steps.add("first", ids), steps.add("second", ids)
    steps.step()
    assert second.num_computed_tokens == 320, "it hit the blocks of the first"
    assert steps.pool.get_num_free_blocks() == 0
    blocks = steps.scheduler.manager.req_to_blocks["first"]
    assert all(block.ref_cnt == 2 for block in blocks[:18])
    steps.run()
    assert first.num_preemptions == 0
    assert second.num_preemptions >= 1
    assert steps.evictions("first")[0].target == steps.evictions("first")[0].source[:4], "packed in place"
    assert len(steps.evictions("first")) == len(steps.evictions("second")) == 1
    ended(steps, first=8, second=8)


@pytest.mark.parametrize("ahead", [False, True], ids=["step", "ahead"])
def test_the_last_request_waits_for_those_before_it(tiny_model, ahead):
    """The one that keeps everything runs on; the one behind it, whose originals it shares, preempts itself."""
    ids = prompts(1, 320, 320)[0]
    steps = Steps(tiny_model, {"method": "snapkv", "budget": "30%"}, [full_spec(BLOCK)], 1 + 24, ahead=ahead)
    first = steps.add("first", ids, budget=None)
    second = steps.add("second", ids)
    steps.step()
    assert second.num_computed_tokens == 320
    while steps.pool.get_num_free_blocks():
        steps.pool.get_new_blocks(1)
    held = 2
    steps.step()
    assert second.num_preemptions == 1
    assert not steps.evictions("second")
    assert first.num_preemptions == 0
    taken = [block for block in steps.pool.blocks if block.ref_cnt == 1 and not _owned(steps, block)]
    assert len(taken) == held
    steps.pool.free_blocks(taken)
    steps.run()
    assert len(steps.evictions("second")) == 1
    ended(steps, first=8, second=8)


def _owned(steps, block):
    rows = steps.scheduler.manager.req_to_blocks.values()
    return block.is_null or any(block is one for row in rows for one in row)


def test_the_order_of_a_request_that_is_preempted_after_it_is_not_sent(tiny_model):
    """It runs again in the same step, with other blocks than the order names."""
    texts = prompts(2, 700, 700)
    shared = texts[1][:320]
    steps = Steps(
        tiny_model,
        {"method": "snapkv", "budget": "30%"},
        [full_spec(BLOCK)],
        1 + 66,
        batch=600,
        scheduling_policy="priority",
        scheduler_reserve_full_isl=False,
    )
    worst = steps.add("worst", texts[0], priority=5, budget="90%")
    steps.step()
    steps.add("b", shared, budget="50%")
    steps.add("c", shared, budget="50%")
    steps.step()
    assert steps.pool.get_num_free_blocks() == 0
    assert worst.num_computed_tokens == 700
    steps.step()
    assert worst.num_preemptions == 1
    assert "worst" in steps.outputs[-1].num_scheduled_tokens, "it runs again in the same step"
    assert not steps.evictions("worst")
    steps.run()
    assert len(steps.evictions("worst")) == 1
    ended(steps, worst=8, b=8, c=8)


@pytest.mark.parametrize("ahead", [False, True], ids=["step", "ahead"])
def test_many_requests_on_one_prompt_in_a_full_pool_all_end(tiny_model, ahead):
    ids = prompts(1, 400, 400)[0]
    steps = Steps(
        tiny_model, {"method": "h2o", "budget": 160, "recent": 32}, [full_spec(BLOCK)], 1 + 40, ahead=ahead, batch=256
    )
    for index in range(6):
        steps.add(f"r{index}", ids, new=70)
    steps.run(3000)
    ended(steps, **{f"r{index}": 70 for index in range(6)})


# ---------------------------------------------------------------------- asynchronous scheduling


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "snapkv", "budget": "30%"},
        {"method": "tova", "budget": 96, "recent": 32},
        {"method": "streaming", "budget": 96, "recent": 32, "prefill": "chunks", "chunk": 64},
    ],
    ids=["once", "while decoding", "inside the prompt"],
)
def test_one_step_ahead_evicts_at_the_same_positions(tiny_model, settings):
    """Each event reaches the workers with the step that computes the token behind it, and no token is lost."""
    texts = prompts(4, 200, 500)
    found = {}
    for ahead in (False, True):
        steps = Steps(tiny_model, settings, [full_spec(BLOCK)], 400, ahead=ahead, batch=256)
        for index, ids in enumerate(texts):
            steps.add(f"r{index}", ids, new=50)
        steps.run(500)
        orders = {f"r{index}": steps.evictions(f"r{index}") for index in range(4)}
        found[ahead] = {name: [(one.computed, one.left_before) for one in each] for name, each in orders.items()}
        for output in steps.outputs:
            _check_positions(output)
        ended(steps, **{f"r{index}": 50 for index in range(4)})
    assert found[True] == found[False]
    assert all(found[True].values())
    for index, ids in enumerate(texts):
        assert found[True][f"r{index}"][0][0] <= len(ids)


def _check_positions(output):
    """Assert that a request that evicts computes the token at that position next."""
    from millpond_vllm import compat

    cached = output.scheduled_cached_reqs
    begins = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for one in compat.orders_of(output).evictions:
        assert begins.get(one.request, one.computed) == one.computed


@pytest.mark.parametrize("method", ["snapkv", "h2o"])
def test_no_chunk_of_one_token_where_whole_steps_are_recorded(tiny_model, method):
    """In a recorded graph no query is seen: a prompt for which one token is left in a step waits for the next."""
    steps = Steps(tiny_model, {"method": method, "budget": "30%", "recent": 32}, [full_spec(BLOCK)], 400, batch=3)
    steps.scheduler._records_steps = True
    for name in ("first", "other"):
        steps.add(name, prompts(1, 60, 60)[0], new=12)
    while not all(steps.tokens.values()):
        steps.step()
    second = steps.add("second", prompts(1, 101, 101, seed=2)[0], new=40)
    found = []
    while steps.scheduler.has_requests():
        begin = second.num_computed_tokens
        output = steps.step()
        if begin < 101 and "second" in output.num_scheduled_tokens:
            found.append(output.num_scheduled_tokens["second"])
        assert len(steps.outputs) < 500
    assert sum(found) >= 101
    assert 1 not in found[:-1]
    assert len(steps.evictions("second")) >= 1
    ended(steps, first=12, other=12, second=40)
