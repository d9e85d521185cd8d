"""Which tokens of a tokenizer are special and which are punctuation, and how methods come to know."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import millpond as mp
from millpond.errors import OptionError
from millpond.hf.tokenizer_source import fill_classes, token_classes
from millpond.methods import METHODS
from millpond.policy.head_rules import HeadRulesPolicy
from millpond.policy.token_classes import TokenClasses
from tests.helpers.matrix.models import llama, prompts


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE of single bytes and a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "."), ("?", "!"), ("a", "."), ("Ġ", "a"), ("â", "Ģ"), ("âĢ", "ľ")]
    vocabulary = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": ["[INST]"]})
    return made


def test_classes_of_a_tokenizer() -> None:
    tokenizer = byte_level()
    found = token_classes(tokenizer)
    assert found.special is not None
    assert found.punctuation is not None
    assert found.special == set(tokenizer.convert_tokens_to_ids(["<s>", "</s>", "[INST]"]))
    spelled = {str(tokenizer.decode([i])) for i in found.punctuation}
    assert {".", " .", "?", "?!", ":", "\u201c"} <= spelled
    assert not {"a", "a.", " a", " ", "+", "<s>"} & spelled
    assert token_classes(tokenizer) is found
    tokenizer.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]"]})
    assert len(token_classes(tokenizer).special or ()) == 4


def test_given_ids_come_first() -> None:
    tokenizer = byte_level()
    own = token_classes(tokenizer)
    assert fill_classes(TokenClasses(), tokenizer) == own
    assert fill_classes(TokenClasses(frozenset({1}), None), tokenizer) == TokenClasses(frozenset({1}), own.punctuation)
    given = TokenClasses(frozenset(), frozenset({2}))
    assert fill_classes(given, None) is given


def test_without_a_tokenizer() -> None:
    with pytest.raises(OptionError, match="pass tokenizer= to compress, or the ids as its options"):
        mp.compress(llama(), "fastgen", special="1")
    with pytest.raises(OptionError, match="tokenizer='gpt2' is not a transformers tokenizer"):
        mp.compress(llama(), "fastgen", tokenizer="gpt2")  # type: ignore[arg-type]


def test_a_policy_learns_too_and_needs_no_budget() -> None:
    tokenizer, (ids, _) = byte_level(), prompts(1)
    with torch.no_grad():
        for method in ("fastgen", METHODS.get("fastgen")()):
            with mp.compress(llama(), method, tokenizer=tokenizer) as cache:
                assert cache.budget is None
                assert isinstance(cache.policy, HeadRulesPolicy)
                assert cache.policy.classes == token_classes(tokenizer)
                model_ids = ids % 96
                llama()(model_ids, cache=cache)
                cache.check_integrity()
