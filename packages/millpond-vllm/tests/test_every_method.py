"""Every method of Millpond: it keeps on blocks what `mp.compress` keeps, or is refused with the reason."""

from dataclasses import replace

import pytest
import torch
from fed_state import BLOCK, Feed, Text, kept_by_compress, new_state, random_heads, seen_by_layers, small_llama

import millpond as mp
from millpond.plugins import make_policy
from millpond.policy.scores.trained import Retained
from millpond_vllm.methods import fitted, refusal
from millpond_vllm.settings import BlockRules, EngineSettings, RequestSettings

#: Why a method cannot act, by a few words of the reason.
REFUSED = {
    "attention_gate": "hidden states",
    "attention_matching": "a second time",
    "cake": "among layers by the prompt",
    "cam": "merges entries",
    "d2o": "merges entries",
    "duo_attention": "rules of their own",
    "elastic": "merges entries",
    "ems": "merges entries",
    "fastgen": "rules of their own",
    "fastkvzip": "hidden states",
    "infllm": "looks blocks up",
    "kvmerger": "merges entries",
    "kvzap": "hidden states",
    "kvzip": "a second time",
    "lava": "among layers by the prompt",
    "locret": "the file of its networks",
    "merge_on_evict": "merges entries",
    "minference": "by patterns",
    "random_attention": "a whole prompt",
    "simlayerkv": "among layers by the prompt",
    "sirllm": "predictions",
    "triattention": "a whole prompt",
}
ACTING = [name for name in mp.list_methods() if name not in (*REFUSED, "full")]


@pytest.fixture(scope="module")
def model():
    return small_llama()


@pytest.fixture(scope="module")
def seen(model):
    """Two prompts and what the layers see of them."""
    draw = torch.Generator().manual_seed(5)
    ids = [torch.randint(5, 500, (n,), generator=draw).tolist() for n in (230, 171)]
    return [(one, seen_by_layers(model, one)) for one in ids]


def texts(seen, policy, name):
    rules = BlockRules(EngineSettings(name, "60%"), policy, BLOCK)
    found, block = [], 1
    for request, (ids, layers) in zip("ab", seen, strict=True):
        n = -(-len(ids) // BLOCK)
        blocks = list(range(block, block + n))[::-1]
        found.append(Text(request, ids, rules.times(len(ids), RequestSettings()), layers, blocks))
        block += n
    return found


def test_every_method_acts_or_is_refused():
    assert set(mp.list_methods()) == {*REFUSED, *ACTING, "full"}
    assert len(ACTING) >= 23


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_cannot_act_is_refused_with_the_reason(name):
    policy = make_policy(name, {})
    reason = refusal(policy)
    assert reason is not None
    assert REFUSED[name] in reason
    with pytest.raises(mp.OptionError, match="use snapkv"):
        fitted(name, policy)


def locret_with(heads):
    return replace(make_policy("locret", {}), score=Retained(heads))


def test_locret_acts_with_the_networks_of_the_model(model, seen):
    policy = fitted("locret", locret_with(random_heads(model)))
    both = texts(seen, policy, "snapkv")
    feed = Feed(model, policy, both)
    for counts in ({"a": 100}, {"a": 130, "b": 170}, {"b": 1}):
        feed.step(counts)
    for text in both:
        assert feed.evict(text.request) == kept_by_compress(model, policy, text), text.request


def test_networks_of_another_model_fail_when_the_engine_starts(model):
    new_state(model, fitted("locret", locret_with(random_heads(model))), 4).check()
    for heads in (random_heads(model, n_layers=2), random_heads(model, kv_heads=3)):
        with pytest.raises(mp.CacheMismatchError, match="take those of this model"):
            new_state(model, fitted("locret", locret_with(heads)), 4).check()


@pytest.mark.parametrize("name", ACTING)
def test_every_method_plans_for_every_layer(name, model):
    new_state(model, fitted(name, make_policy(name, {})), 4).check()


@pytest.mark.parametrize("name", ACTING)
def test_what_is_kept_is_what_compress_keeps(name, model, seen):
    """Two requests in one batch, in unequal chunks, one of them with a last chunk of one token."""
    policy = fitted(name, make_policy(name, {}))
    both = texts(seen, policy, name)
    assert all(text.times.first() == len(text.ids) for text in both), "the budget is small enough"
    feed = Feed(model, policy, both)
    for counts in ({"a": 100}, {"a": 70, "b": 90}, {"a": 59, "b": 80}, {"b": 1, "a": 1}):
        feed.step(counts)
    for text in both:
        assert feed.evict(text.request) == kept_by_compress(model, policy, text), text.request
