"""Answers: what a full cache says is what transformers says, and compression comes before the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond_lab.evals.decoding.greedy_decode import before_stop
from millpond_lab.evals.decoding.record import Protocol
from millpond_lab.evals.sample import Question, Sample
from tests.helpers.evals.small import TinyTask, examined, text, tiny_model, tiny_samples, tiny_tokenizer, with_stop

PROTOCOLS: list[Protocol] = ["aware", "agnostic", "turns"]


def stock(prompt: str, new: int) -> str:
    """The plain greedy answer of transformers."""
    inputs = tiny_tokenizer()(prompt, return_tensors="pt")
    ids = inputs["input_ids"]
    out = tiny_model().generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0
    )
    return tiny_tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("protocol", ["aware", "agnostic"])
def test_a_full_cache_answers_as_transformers_does(protocol: Protocol) -> None:
    samples = tiny_samples(3)
    for record in examined(TinyTask(items=samples), "full", protocol=protocol, size=4):
        sample = next(s for s in samples if s.id == record.sample)
        question = sample.questions[record.question]
        assert record.answer == stock(sample.context + question.text, question.max_new_tokens)
        assert record.kept_share == 1
        assert not record.failure


def test_turns_go_on_from_the_whole_answer() -> None:
    samples = tiny_samples(2)
    records = examined(TinyTask(items=samples), "full", protocol="turns", size=2)
    for sample in samples:
        so_far = sample.context
        for question, record in zip(sample.questions, [r for r in records if r.sample == sample.id], strict=True):
            so_far += question.text
            assert record.answer == stock(so_far, question.max_new_tokens)
            so_far += " " + record.answer


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_one_token_answer_comes_from_the_compressed_cache(protocol: Protocol) -> None:
    samples = tiny_samples(6, asks=(1,), new=1)
    full = examined(TinyTask(items=samples), "full", protocol=protocol)
    window = examined(TinyTask(items=samples), "window", "2", protocol)
    assert [r.answer for r in full] != [r.answer for r in window]
    for record in window:
        assert record.kept_share == pytest.approx(2 / (record.prompt_tokens - 1))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_fell_out_of_the_window_cannot_change_the_answer(protocol: Protocol) -> None:
    one = tiny_samples(1, asks=(2,))[0]
    words = one.context.split()
    other = replace(one, context=" ".join(text(len(words) - 12, 77).split() + words[-12:]))
    # one layer: in more, what is kept has itself seen what left
    from tests.helpers.matrix.models import llama

    model = llama("gqa", layers=1)
    answers = [
        examined(TinyTask(items=(sample,)), "window", "6", protocol, model=model)[0].answer for sample in (one, other)
    ]
    assert answers[0] == answers[1]


def test_an_answer_without_end_is_no_failure_but_noted() -> None:
    record = examined(TinyTask(items=tiny_samples(1, asks=(1,))), "full")[0]
    assert (record.extra["ended"], record.extra["tokens"], record.failure) == (0, 6, "")


@pytest.mark.parametrize("size", [1, 9])
def test_a_stop_text_ends_an_answer_and_does_not_belong_to_it(size: int) -> None:
    samples = tiny_samples(3)
    plain = examined(TinyTask(items=samples), "full", size=size)
    word = plain[0].answer.split()[2]
    for before, after in zip(plain, examined(TinyTask(items=with_stop(samples, word)), "full", size=size), strict=True):
        assert after.answer == before.answer.split(word)[0]
        assert after.extra["ended"] == (word in before.answer)


def test_the_end_of_text_ends_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = tiny_samples(3)
    plain = examined(TinyTask(items=samples), "full", protocol="turns")
    word = plain[0].answer.split()[1]
    monkeypatch.setattr(tiny_model().generation_config, "eos_token_id", [int(word[1:])])
    ended = examined(TinyTask(items=samples), "full", protocol="turns", size=3)
    assert ended[0].extra == {"ended": 1, "tokens": 2}
    assert ended == examined(TinyTask(items=samples), "full", protocol="turns", size=1)


def test_before_stop_takes_the_first_place_of_any_text() -> None:
    assert before_stop("a b c", ("z", "c", "b")) == ("a ", True)
    assert before_stop("a b c", ("z",)) == ("a b c", False)
    assert before_stop("\nx", ("\n",)) == ("", True)


@pytest.mark.covering
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("size", [1, 4])
def test_a_prompt_longer_than_the_model_is_a_counted_failure(protocol: Protocol, size: int) -> None:
    samples = tiny_samples(3)
    records = examined(TinyTask(items=samples), "full", protocol=protocol, size=size, limit=45)
    failed = {r.sample for r in records if "more than the model's 45" in r.failure or "longer than the" in r.failure}
    assert "s2" in failed
    assert "s0" not in failed
    assert all(r.score == 0 and r.weight == 1 for r in records if r.failure)


def test_an_answer_for_which_no_positions_are_left_is_a_failure() -> None:
    sample = tiny_samples(1, asks=(1,))[0]  # <bos>, 24 words, 1 word
    record = examined(TinyTask(items=(sample,)), "full", limit=28)[0]
    assert "did not end within the model's 28 positions" in record.failure
    assert record.extra["tokens"] == 3
    assert not examined(TinyTask(items=(sample,)), "full", limit=31)[0].failure


def test_a_budget_in_bytes_is_of_each_sequence() -> None:
    task = TinyTask(items=tiny_samples(4))
    alone = examined(task, "h2o:recent=1", "24KiB", "agnostic", size=1)
    assert alone == examined(task, "h2o:recent=1", "24KiB", "agnostic", size=12)
    assert all(r.kv_bytes <= 24 * 1024 for r in alone)


def test_an_empty_context_is_refused_where_it_should_be_compressed() -> None:
    tokenizer = tiny_tokenizer()
    sample = Sample("empty", "", (Question(" w5 w6", ("w7",)),))
    assert len(tokenizer("")["input_ids"]) == 1  # <bos>: there is a token to open with
    assert not examined(TinyTask(items=(sample,)), "window", "4", "agnostic")[0].failure
