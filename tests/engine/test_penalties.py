"""Penalties and biases against a dictionary of counts and against transformers' processors."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from millpond.engine.sampling.params import SamplingParams
from millpond.engine.sampling.penalties import Penalties
from tests.helpers.examples import examples

SIZE = 13

params_of = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, -0.7, 1.1]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 0.9]),
    logit_bias=st.dictionaries(st.integers(0, SIZE - 1), st.floats(-100, 100, width=32), max_size=3),
)
tokens_of = st.lists(st.integers(0, SIZE - 1), max_size=6)


def plain(logits: Tensor, params: SamplingParams, prompt: list[int], answer: list[int]) -> Tensor:
    """The three formulas and the bias, one token at a time."""
    counts, found = Counter(answer), logits.double().tolist()
    for token in range(len(found)):
        if token in counts or token in prompt:
            r = params.repetition_penalty
            found[token] = found[token] / r if found[token] > 0 else found[token] * r
        found[token] -= params.frequency_penalty * counts[token] + params.presence_penalty * (token in counts)
        found[token] += params.logit_bias.get(token, 0.0)
    return torch.tensor(found)


@settings(max_examples=examples(50))
@given(
    requests=st.lists(st.tuples(params_of, tokens_of, tokens_of), min_size=1, max_size=7),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_any_batch_in_any_order(
    requests: list[tuple[SamplingParams, list[int], list[int]]], seed: int, data: st.DataObject
) -> None:
    """Each step counts a part of the batch, as when requests come, go and are swapped out."""
    penalties = Penalties()
    generator = torch.Generator().manual_seed(seed)
    for key, (params, prompt, _) in enumerate(requests):
        penalties.start(key, params, prompt)
    left = {key: list(answer) for key, (_, _, answer) in enumerate(requests)}
    while any(left.values()):
        keys = data.draw(st.permutations([key for key, tokens in left.items() if tokens]))
        keys = keys[: data.draw(st.integers(1, len(keys)))]
        penalties.count(keys, [left[key].pop(0) for key in keys])
    keys = data.draw(st.permutations(range(len(requests))))
    logits = torch.randn(len(keys), SIZE, generator=generator)
    expected = torch.stack([plain(logits[i], *requests[key]) for i, key in enumerate(keys)])
    penalties.apply_(keys, logits)
    torch.testing.assert_close(logits.double(), expected.double(), rtol=1e-5, atol=1e-5)


def test_repetition_is_transformers() -> None:
    logits, ids = torch.randn(1, SIZE), [3, 5, 5, 0]
    penalties = Penalties()
    penalties.start("a", SamplingParams(repetition_penalty=1.7), ids)
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), logits.clone())
    penalties.apply_(["a"], logits)
    assert torch.equal(logits, theirs)


def test_biases_are_transformers() -> None:
    logits, bias = torch.randn(1, SIZE), {3: 2.5, 0: -50.0}
    penalties = Penalties()
    penalties.start("a", SamplingParams(logit_bias=bias), [])
    processor = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    theirs = processor(torch.tensor([[1]]), logits.clone())
    penalties.apply_(["a"], logits)
    assert torch.equal(logits, theirs)


def test_rows_are_used_again_and_clean() -> None:
    penalties = Penalties()
    params = SamplingParams(presence_penalty=2.0, repetition_penalty=2.0)
    penalties.start("stays", params, [])
    for i in range(20):
        penalties.start(i, params, [i % SIZE])
        logits = torch.ones(2, SIZE)
        penalties.apply_(["stays", i], logits)
        assert logits[0].tolist() == [1.0] * SIZE
        assert logits[1].tolist() == [0.5 if token == i % SIZE else 1.0 for token in range(SIZE)]
        penalties.count([i], [7])
        penalties.stop(i)
    assert penalties.counts_bytes == 4 * 64 * 12
    penalties.stop("stays")
    assert penalties.counts_bytes == 0


def test_long_answers_and_many_completions() -> None:
    """More tokens and more completions than there was room for at first."""
    penalties, size = Penalties(), 1000
    for key in range(11):
        penalties.start(key, SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0), range(100 + key))
    for token in range(300, 500):
        penalties.count([3, 9], [token, token - token % 2])
    logits = torch.ones(11, size)
    penalties.apply_(range(11), logits)
    for key, row in enumerate(logits.tolist()):
        counted = {3: dict.fromkeys(range(300, 500), 1), 9: dict.fromkeys(range(300, 500, 2), 2)}.get(key, {})
        assert row == [0.5 - counted.get(j, 0) if j < 100 + key or j in counted else 1.0 for j in range(size)]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0, top_p=0.5)])
def test_who_has_no_penalty_costs_nothing(params: SamplingParams) -> None:
    penalties = Penalties()
    penalties.start("a", params, [1, 2, 3])
    assert "a" not in penalties
    logits = torch.randn(1, SIZE)
    before = logits.clone()
    penalties.apply_(["a"], logits)
    penalties.count(["a"], [1])
    penalties.stop("a")
    assert torch.equal(logits, before)
    assert penalties.counts_bytes == 0


@settings(max_examples=examples(50))
@given(
    requests=st.lists(
        st.tuples(params_of, tokens_of, tokens_of, st.integers(0, SIZE - 1)), min_size=1, max_size=5, unique_by=id
    ),
    seed=st.integers(0, 1000),
)
def test_a_token_that_the_host_has_not_counted(
    requests: list[tuple[SamplingParams, list[int], list[int], int]], seed: int
) -> None:
    """It weighs as one that it has."""
    logits = torch.randn(len(requests), SIZE, generator=torch.Generator().manual_seed(seed))
    penalties, keys = Penalties(), range(len(requests))
    for key, (params, prompt, answer, _) in enumerate(requests):
        penalties.start(key, params, prompt)
        for token in answer:
            penalties.count([key], [token])
    newest = [last for *_, last in requests]
    ahead, behind = logits.clone(), logits.clone()
    penalties.apply_(keys, ahead, torch.tensor(newest))
    penalties.count(keys, newest)
    penalties.apply_(keys, behind)
    assert torch.equal(ahead, behind)
