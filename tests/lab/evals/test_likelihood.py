"""Likelihoods: token by token through the cache, equal to one plain forward where nothing is evicted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from millpond_lab.evals.decoding.record import Protocol
from millpond_lab.evals.sample import Question, Sample
from tests.helpers.evals.small import TinyTask, examined, tiny_model, tiny_samples, tiny_tokenizer

PROTOCOLS: list[Protocol] = ["aware", "agnostic", "turns"]
ONE_EACH = tiny_samples(4, asks=(2,))


def ids_of(text: str, special: bool = False) -> list[int]:
    return tiny_tokenizer()(text, add_special_tokens=special)["input_ids"]


@torch.no_grad()
def plain_logprobs(prompt: str, target: str) -> list[float]:
    """Of the target's tokens, by one forward pass without a cache."""
    head, tail = ids_of(prompt, special=True), ids_of(target)
    logits = tiny_model()(torch.tensor([head + tail]), use_cache=False).logits[0]
    return [float(torch.log_softmax(logits[len(head) - 1 + i], -1)[token]) for i, token in enumerate(tail)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_perplexity_of_a_full_cache_is_that_of_a_plain_forward(protocol: Protocol) -> None:
    records = examined(TinyTask("perplexity", ONE_EACH), "full", protocol=protocol, size=3)
    for sample, record in zip(ONE_EACH, records, strict=True):
        question = sample.questions[0]
        expected = plain_logprobs(sample.context + question.text, question.references[0])
        assert record.score == pytest.approx(-sum(expected) / len(expected), abs=1e-9)
        assert record.weight == len(expected)


def test_perplexity_of_a_window_is_made_from_the_window() -> None:
    sample = Sample("s", ONE_EACH[0].context, (Question("", (ONE_EACH[1].context,)),))
    nll = {
        m: examined(TinyTask("perplexity", (sample,)), m, b, p)[0].score
        for m, b, p in (("full", "", "aware"), ("window", "3", "aware"))
    }
    assert abs(nll["full"] - nll["window"]) > 1e-3
    # a bare context: its last token is the first step, in each protocol
    again = examined(TinyTask("perplexity", (sample,)), "window", "3", "agnostic")[0]
    assert again.score == pytest.approx(nll["window"], abs=1e-9)


def test_the_first_token_is_predicted_from_what_is_kept() -> None:
    samples = tuple(replace(s, questions=(Question("", (s.questions[0].references[0].split()[0],)),)) for s in ONE_EACH)
    task = TinyTask("perplexity", samples)
    for protocol in PROTOCOLS:
        full, window = examined(task, "full", "", protocol), examined(task, "window", "1", protocol)
        assert all(abs(a.score - b.score) > 1e-6 for a, b in zip(full, window, strict=True))


@pytest.mark.parametrize("protocol", ["aware", "agnostic"])
def test_choices_are_compared_by_their_log_probability(protocol: Protocol) -> None:
    samples = tiny_samples(3, asks=(1, 2))
    for record in examined(TinyTask("choice", samples), "full", protocol=protocol, size=8):
        sample = next(s for s in samples if s.id == record.sample)
        question = sample.questions[record.question]
        sums = [sum(plain_logprobs(sample.context + question.text, choice)) for choice in question.choices]
        best = sums.index(max(sums))
        assert record.answer == question.choices[best]
        assert record.score == record.extra["acc"] == (best == question.right)
        long = [value / len(choice) for value, choice in zip(sums, question.choices, strict=True)]
        assert record.extra["acc_norm"] == (long.index(max(long)) == question.right)


def test_in_turns_the_chosen_choice_stays_in_the_text() -> None:
    sample = tiny_samples(1, asks=(2, 2))[0]
    first, second = examined(TinyTask("choice", (sample,)), "full", protocol="turns")
    so_far = sample.context + sample.questions[0].text + " " + first.answer + sample.questions[1].text
    sums = {choice: sum(plain_logprobs(so_far, choice)) for choice in sample.questions[1].choices}
    assert second.answer == max(sums, key=lambda choice: sums[choice])


def test_a_full_cache_is_faithful_to_itself_and_a_window_is_not() -> None:
    task = TinyTask("fidelity", ONE_EACH)
    for record in examined(task, "full", size=4):
        assert record.score == 1
        assert record.extra["kl"] == pytest.approx(0, abs=1e-12)
        assert record.extra["attention_loss"] == record.extra["evicted_attention"] == 0
    for record in examined(task, "window", "2", size=4):
        assert record.extra["kl"] > 1e-3
        assert 0 < record.extra["attention_loss"] <= record.extra["attention_bound"]
        assert record.weight == len(ids_of(ONE_EACH[int(record.sample[1])].questions[0].references[0]))


@pytest.mark.parametrize("kind", ["perplexity", "fidelity", "choice"])
def test_nothing_to_feed_is_a_failure_not_a_perfect_score(kind: str) -> None:
    sample = Sample("s", ONE_EACH[0].context, (Question(" w5"), Question(" w5", ("",), choices=("w3", ""))))
    for record in examined(TinyTask(kind, (sample, *ONE_EACH)), "full", size=6)[:2]:
        assert "without tokens" in record.failure
        assert record.weight == (1 if kind == "choice" else 0)


def test_a_text_longer_than_the_model_weighs_nothing_in_perplexity() -> None:
    record = examined(TinyTask("perplexity", ONE_EACH), "full", limit=29)[0]
    assert "30 tokens with the question and what follows" in record.failure
    assert record.weight == 0
    assert not examined(TinyTask("perplexity", ONE_EACH), "full", limit=30)[0].failure
    assert math.isfinite(record.score)
