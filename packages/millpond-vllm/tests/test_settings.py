import pytest

from millpond import Budget, BudgetError, MillpondError, OptionError
from millpond_vllm.event_times import NEVER
from millpond_vllm.settings import BlockRules, EngineSettings, RequestSettings


def rules(block=32, pool=None, **given):
    settings = EngineSettings.parse(given)
    return BlockRules(settings, settings.policy(), block, pool)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (7, "must be a mapping"),
        ({"metod": "h2o"}, "unknown setting 'metod'"),
        ({"method": "h3o"}, "unknown method"),
        ({"method": "h2o", "options": {"sink": 4}}, "sink"),
        ({"method": "kvzip"}, "kvzip"),
        ({"method": "attention_gate"}, "hidden states"),
        ({"method": "d2o"}, "merges entries"),
        ({"method": "fastgen"}, "rules of their own"),
        ({"budget": "0%"}, "above 0"),
        ({"budget": "64MiB"}, "vLLM sizes the pool"),
        ({"recent": -1}, "recent=-1 must be a whole number"),
        ({"chunk": 0}, "chunk=0"),
        ({"prefill": "twice"}, "prefill='twice'"),
    ],
)
def test_wrong_settings_of_an_engine_are_refused(given, says):
    with pytest.raises(MillpondError, match=says):
        EngineSettings.parse(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"millpond": 3}, "must be a mapping"),
        ({"millpond": {"budgt": "30%"}}, "unknown setting 'budgt'"),
        ({"millpond_budgt": "30%"}, "unknown setting 'budgt'"),
        ({"millpond_budget": "lots"}, "is not a budget"),
        ({"millpond_budget": "30%", "millpond": {"budget": "20%"}}, "given twice"),
        ({"millpond_keep": "all"}, "list of spans"),
        ({"millpond_keep": [1, 2, 3]}, "takes pairs"),
        ({"millpond_keep": [5, 5]}, "empty"),
        ({"millpond_keep": [0, 1] * 2000}, "1,024 spans"),
        ({"millpond_sinks": 2**40}, "sinks=1099511627776"),
        ({"millpond_recent": "many"}, "recent='many'"),
    ],
)
def test_wrong_settings_of_a_request_are_refused(given, says):
    with pytest.raises(OptionError, match=says):
        RequestSettings.parse(given)


def test_nested_and_flat_settings_of_a_request_are_one():
    nested = RequestSettings.parse({"millpond": {"budget": "30%", "keep": [[0, 40], [90, 95]], "sinks": 4}})
    flat = RequestSettings.parse(
        {"millpond_budget": "30%", "millpond_keep": [0, 40, 90, 95.0], "millpond_sinks": 4, "other": 1}
    )
    assert nested == flat
    assert flat.budget == Budget.parse("30%")
    assert flat.keep == ((0, 40), (90, 95))


def test_a_budget_in_tokens_that_leaves_no_block_is_refused_at_start():
    with pytest.raises(BudgetError, match="leaves no block of 32 tokens beside the newest 32; give at least 64"):
        rules(method="snapkv", budget=50).check()
    rules(method="snapkv", budget=64).check()


def test_a_share_of_a_short_prompt_keeps_one_block():
    times = rules(method="snapkv", budget="10%").times(100, RequestSettings())
    assert (times.packed, times.recent) == (1, 32)


def test_a_request_may_keep_everything():
    asked = RequestSettings.parse({"millpond": {"budget": None}})
    assert rules(budget="20%").times(5000, asked).first() == NEVER


def test_prompts_evict_inside_where_the_pool_is_smaller():
    small, large = rules(budget=256, pool=30), rules(budget=256, pool=200)
    assert small.times(2000, RequestSettings()).first() < 2000
    assert large.times(2000, RequestSettings()).first() == 2000
    once = rules(budget=256, pool=30, prefill="once")
    assert once.times(2000, RequestSettings()).first() == 2000


def test_h2o_keeps_half_of_its_budget_for_the_newest():
    times = rules(method="h2o", budget="20%").times(3000, RequestSettings())
    assert (times.recent, times.packed, times.decoding) == (300, 9, True)


def test_kept_spans_have_room():
    asked = RequestSettings.parse({"millpond": {"keep": [[0, 300]]}})
    times = rules(method="streaming", budget=128).times(1000, asked)
    assert times.packed * times.block >= 300 + 4
