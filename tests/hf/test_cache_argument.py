"""A Millpond cache under either name of its argument, with any version of transformers, and without a warning."""

from functools import partial

import pytest
import torch
from transformers import DynamicCache

import millpond as mp
from millpond.errors import OptionError
from millpond.models.cache_argument import CACHE_ARGUMENT, CACHE_ARGUMENTS, cache_among, with_cache
from tests.helpers.hf.families import shared_model, text


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_either_name_is_taken(family: str, name: str) -> None:
    model, ids = shared_model(family), text(2, 24)
    common = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad(), mp.compress(model, method="full") as cache:
        expected = model(ids).logits
        assert torch.allclose(model(ids, **{name: cache}).logits, expected, atol=1e-5)
        assert cache.get_seq_length() == 24
        cache.reset()
        found = model.generate(ids, **common, **{name: cache})
        assert cache.get_seq_length() == 29
    assert torch.equal(found, model.generate(ids, **common))


@pytest.mark.parametrize("turned", [False, True])
def test_two_caches_under_the_two_names_are_refused(turned: bool) -> None:
    model, ids = shared_model("llama"), text(1, 24)
    with torch.no_grad(), mp.compress(model, method="full") as cache:
        given = dict(zip(CACHE_ARGUMENTS[:: -1 if turned else 1], (cache, DynamicCache()), strict=True))
        for call in (model, partial(model.generate, max_new_tokens=2)):
            with pytest.raises(OptionError, match=r"cache= \(.*Cache\) and past_key_values= .* pass one of the two"):
                call(ids, attention_mask=torch.ones_like(ids), **given)
        assert cache.get_seq_length() == 0
        same = model(ids, **dict.fromkeys(CACHE_ARGUMENTS, cache)).logits
    assert torch.allclose(same, model(ids).logits, atol=1e-5)


def test_a_cache_is_found_and_renamed() -> None:
    assert cache_among({"cache": None, "past_key_values": 2}) == 2
    assert cache_among({"cache": 1}) == 1
    assert cache_among({"use_cache": True}) is None
    assert with_cache({"a": 0, "past_key_values": None, "cache": None}, 3) == {"a": 0, CACHE_ARGUMENT: 3}
