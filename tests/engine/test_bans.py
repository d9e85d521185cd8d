"""What a request forbids by name, against plain words and transformers' processors."""

from __future__ import annotations

import asyncio
import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

import millpond as mp
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.detokenizer import Writer
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.engine.sampling.banned_tokens import Bans, Forbidden, sequences_of
from millpond.engine.sampling.params import MAX_BAD_WORDS, SamplingParams
from millpond.engine.sampling.sampler import BadLogitsError, Sampler
from millpond.errors import OptionError
from tests.engine import test_constraint as test_sampling_constrain
from tests.helpers.engine.helpers import ask, engine_for, finish, greedy
from tests.helpers.evals.small import WORDS, text, tiny_model, tiny_tokenizer
from tests.helpers.examples import examples

SIZE = 257
byte_tokenizer = cache(test_sampling_constrain.byte_tokenizer)


def left(params: SamplingParams, said: list[int], tokenizer: Any = None, ends: tuple[int, ...] = ()) -> set[int]:
    """The tokens that may come after an answer's beginning."""
    forbidden, logits = Forbidden(), torch.zeros(1, SIZE)
    bans = Bans.of(params, tokenizer, ends)
    assert bans is not None
    forbidden.start("a", bans)
    for token in said:
        forbidden.count(["b", "a"], [0, token])
    forbidden.apply_(["a"], logits)
    return {token for token, value in enumerate(logits[0].tolist()) if math.isfinite(value)}


def test_only_what_is_allowed_is_left() -> None:
    assert left(SamplingParams(allowed_token_ids=(3, 5, 5)), []) == {3, 5}


@pytest.mark.parametrize("said", [0, 1, 2, 3, 9])
def test_ends_come_after_so_many_tokens_and_not_before(said: int) -> None:
    found = left(SamplingParams(min_tokens=3, stop_token_ids=(9,)), [1] * said, ends=(7,))
    assert found == set(range(SIZE)) - ({7, 9} if said < 3 else set())
    assert 7 in left(SamplingParams(min_tokens=3, stop_token_ids=(9,), ignore_eos=True), [], ends=(7,))


def test_what_forbids_nothing_any_more_costs_nothing() -> None:
    forbidden, bans = Forbidden(), Bans.of(SamplingParams(min_tokens=2, stop_token_ids=(9,)), None, ())
    assert bans is not None
    forbidden.start("a", bans)
    forbidden.count(["a"], [1])
    assert "a" in forbidden
    forbidden.count(["a"], [1])
    assert "a" not in forbidden


@settings(max_examples=examples(60))
@given(
    words=st.lists(st.text("ab ", min_size=1, max_size=4).filter(str.strip), min_size=1, max_size=5),
    said=st.lists(st.sampled_from("ab "), max_size=9),
)
def test_bad_words_are_transformers(words: list[str], said: list[str]) -> None:
    tokenizer = byte_tokenizer()
    answer = tokenizer("".join(said), add_special_tokens=False)["input_ids"]
    ours = left(SamplingParams(bad_words=tuple(words)), answer, tokenizer)
    spelt = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
    processor = NoBadWordsLogitsProcessor(tokenizer(spelt, add_special_tokens=False)["input_ids"])
    theirs = processor(torch.tensor([answer], dtype=torch.long).reshape(1, -1), torch.zeros(1, SIZE))
    assert ours == {token for token, value in enumerate(theirs[0].tolist()) if math.isfinite(value)}


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_never_holds_a_bad_word(seed: int) -> None:
    """Three letters by chance: 300 tokens hold each word of two some thirty times."""
    tokenizer = byte_tokenizer()
    sampler, params = Sampler(tokenizer), SamplingParams(seed=seed, bad_words=("ab", "cc", "bca"))
    sampler.start("a", params, [], bans=sampler.bans_of(params))
    logits = torch.full((1, SIZE), float("-inf"))
    logits[0, tokenizer.convert_tokens_to_ids([*"abc"])] = 0.0
    said = tokenizer.decode([sampler(["a"], logits)[0].token_id for _ in range(300)])
    assert len(said) == 300
    assert not any(word in said for word in params.bad_words)


def test_words_that_the_vocabulary_cannot_spell_forbid_nothing() -> None:
    tokenizer = test_sampling_constrain.byte_tokenizer()
    tokenizer.add_special_tokens({"unk_token": "a"})
    assert sequences_of(["xay"], tokenizer) == []
    assert len(sequences_of(["xy"], tokenizer)) == 2


def test_what_leaves_nothing_names_its_fields() -> None:
    tokenizer = byte_tokenizer()
    sampler = Sampler(tokenizer)
    params = SamplingParams(allowed_token_ids=tuple(tokenizer.convert_tokens_to_ids(["b"])), bad_words=("b",))
    sampler.start("a", params, [], bans=sampler.bans_of(params))
    with pytest.raises(BadLogitsError, match="after 0 tokens bad_words and allowed_token_ids leave no token"):
        sampler(["a"], torch.zeros(1, SIZE))


def test_beside_a_grammar_both_hold_or_the_answer_ends_with_an_error() -> None:
    pytest.importorskip("xgrammar", reason="the extra 'constrained' is not installed")
    tokenizer = byte_tokenizer()
    digits = tokenizer.convert_tokens_to_ids([*"37"])
    params = SamplingParams(temperature=0, regex="[0-9]{2}x", allowed_token_ids=tuple(digits))
    sampler = Sampler(tokenizer)
    sampler.start("a", params, [], grammar=sampler.grammars.of(params), bans=sampler.bans_of(params))
    logits = torch.randn(1, SIZE)
    assert {sampler(["a"], logits)[0].token_id for _ in range(2)} <= set(digits)
    with pytest.raises(BadLogitsError, match=r"after 2 tokens .* as the regex wants within allowed_token_ids"):
        sampler(["a"], logits)


@pytest.mark.parametrize(
    ("min_tokens", "text", "found"),
    [
        (0, "", "ab"),
        (1, "", "ab"),
        (2, "abx", "ab"),
        (4, "abx", "ab"),
        (5, "abxa", "ba"),
        (7, "abxaba", "ab"),
        (8, "abxabaab", None),
    ],
)
def test_stop_texts_are_looked_for_behind_the_least_tokens(min_tokens: int, text: str, found: str | None) -> None:
    """A stop text that is complete with a later token counts, whichever token it began in."""
    tokenizer = byte_tokenizer()
    writer = Writer(tokenizer, SamplingParams(min_tokens=min_tokens, stop=("ab", "ba")))
    stopped = None
    for token in tokenizer("abxabaab", add_special_tokens=False)["input_ids"]:
        _, stopped = writer.add(token)
        if stopped is not None:
            break
    writer.finish()
    assert (writer.text, stopped) == (text, found)


def test_an_engine_ends_no_answer_early() -> None:
    """The tokens of the free answer end it as stop tokens, but not before there are five."""
    engine = engine_for()
    engine.add(ask(40, name="free"))
    free = finish(engine)["free"].completions[0].token_ids
    ends = tuple(set(free))
    assert len(ends) > 1
    for name, least in (("at once", 0), ("late", 5)):
        engine.add(ask(40, greedy(stop_token_ids=ends, min_tokens=least), name))
    done = finish(engine)
    assert done["at once"].completions[0].token_ids == free[:1]
    late = done["late"].completions[0]
    assert len(late.token_ids) > 5 or late.finish_reason == "length"
    assert not set(late.token_ids[:5]) & set(ends)


def test_every_door_keeps_words_and_ids_out() -> None:
    """What the free answer says first is a bad word, then no allowed one: of `LLM` and of `AsyncLLM`, n at a time."""
    prompt = text(20, 1)
    with mp.LLM(tiny_model(), tokenizer=tiny_tokenizer(), method="full") as llm:
        free = answers(llm.generate(prompt, mp.SamplingParams(max_tokens=12, temperature=0)))[0]
        said = tiny_tokenizer().decode(free[0])
        others = tuple({*range(len(WORDS))} - {*free})
        for forbidding in ({"bad_words": (said,)}, {"allowed_token_ids": others}):
            params = mp.SamplingParams(max_tokens=12, n=2, seed=1, **forbidding)  # type: ignore[arg-type]
            found = answers(llm.generate(prompt, params))
            assert not any({*tokens} & ({free[0]} if "bad_words" in forbidding else {*free}) for tokens in found)
            assert asyncio.run(streamed(prompt, params)) == found


def answers(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [completion.token_ids for output in outputs for completion in output.completions]


async def streamed(prompt: str, params: SamplingParams) -> list[tuple[int, ...]]:
    llm = AsyncLLM(tiny_model(), tokenizer=tiny_tokenizer(), method="full")
    try:
        *_, last = [output async for output in llm.stream(Request(request_id="a", prompt=prompt, params=params))]
    finally:
        await llm.close(drain=False)
    return answers([last])


def test_an_engine_without_a_tokenizer_takes_no_words() -> None:
    with pytest.raises(OptionError, match="bad_words needs a tokenizer; forbid token ids with logit_bias"):
        engine_for().add(ask(40, greedy(bad_words=("a",))))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min_tokens": -1}, "min_tokens=-1: must be at least 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is more than max_tokens=4"),
        ({"typical_p": 0}, "typical_p=0 leaves no token"),
        ({"typical_p": 1.5}, "typical_p=1.5: .* at most 1"),
        ({"bad_words": ("a", " ")}, "bad_words holds ' '"),
        ({"bad_words": ("a" * 101,)}, "101 characters; .* 100"),
        ({"bad_words": ("a",) * (MAX_BAD_WORDS + 1)}, "1,001 texts and may have 1,000"),
        ({"allowed_token_ids": ()}, "allowed_token_ids has 0 ids: must have 1 to"),
    ],
)
def test_values_out_of_range_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        mp.SamplingParams(**given)


def test_a_word_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(OptionError, match="of 100 tokens; a word may have 64"):
        sequences_of(["é" * 50], byte_tokenizer())
