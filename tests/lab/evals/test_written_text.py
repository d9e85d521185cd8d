"""Text that is written behind the context, token by token: decoding evicts there, and questions come behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond.errors import OptionError
from millpond.hf.compress import compress
from millpond_lab.evals.decoding.batch import BatchReader, encode
from millpond_lab.evals.decoding.record import Cell, Protocol, Record
from millpond_lab.evals.harness.context_check import positions_needed
from millpond_lab.evals.peers.run import misfit
from millpond_lab.evals.sample import Question, Sample
from tests.helpers.evals.small import TinyTask, examined, text, tiny_model, tiny_samples, tiny_tokenizer
from tests.helpers.evals.task_help import build, count, draw, word_tokenizer


def with_text(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """The samples, behind each of which as many words are written as its number says."""
    return tuple(replace(sample, written=text(9 + 4 * i, 300 + i)) for i, sample in enumerate(samples))


def test_facts_are_in_the_written_text_alone() -> None:
    task = build("stated_facts", length=900, questions=3, prompt=0.25)
    for sample in draw(task, word_tokenizer(), 2):
        context, written = count(word_tokenizer(), sample.context), count(word_tokenizer(), sample.written)
        asked = max(count(word_tokenizer(), q.text) + q.max_new_tokens for q in sample.questions)
        assert 890 <= context + written + asked <= 900
        assert context / (context + written) == pytest.approx(0.25, abs=0.03)
        for question in sample.questions:
            assert question.references[0] in sample.written
            assert question.references[0] not in sample.context + question.text
            assert task.score(question, question.references[0]) == 1.0
            assert task.score(question, question.references[0][:-1]) == 0.0


def test_what_is_stated_is_checked_like_facts_in_prose() -> None:
    for options, message in (
        ({"facts": 9}, "stated_facts: facts=9 must be at most 8"),
        ({"questions": 5}, "stated_facts: questions=5 is more than facts=4"),
        ({"prompt": 1.5}, "prompt=1.5 must be"),
    ):
        with pytest.raises(OptionError, match=message):
            build("stated_facts", **options)


@pytest.mark.parametrize("protocol", ["aware", "agnostic", "turns"])
def test_written_text_stands_between_the_opening_and_every_question(protocol: Protocol) -> None:
    (sample,) = with_text(tiny_samples(1))
    prompts = encode(sample, tiny_tokenizer(), "generate", protocol)
    assert len(prompts) == (3 if protocol == "aware" else 1)
    for prompt in prompts:
        assert (len(prompt.opening), len(prompt.written)) == (25, 9)
        asked = prompt.asked[0]
        assert prompt.opening + prompt.written + asked.tokens == _ids(sample, asked.question)
        assert positions_needed(prompt, "agnostic") == 25 + 9 + max(len(one.tokens) for one in prompt.asked)


def _ids(sample: Sample, question: Question) -> tuple[int, ...]:
    return tuple(tiny_tokenizer()(f"{sample.context} {sample.written}{question.text}")["input_ids"])


@pytest.mark.parametrize(("method", "budget"), [("full", ""), ("h2o", "30%"), ("window", "7")])
@pytest.mark.parametrize("protocol", ["agnostic", "turns"])
def test_answers_behind_written_text_do_not_depend_on_the_batch(method: str, budget: str, protocol: Protocol) -> None:
    task = TinyTask(items=with_text(tiny_samples(3)))
    alone, together = (examined(task, method, budget, protocol, size) for size in (1, 9))
    assert [told(one) for one in alone] == [told(one) for one in together]
    without = examined(TinyTask(items=tiny_samples(3)), method, budget, protocol, 1)
    assert [told(one) for one in alone] != [told(one) for one in without]


def told(record: Record) -> tuple[object, ...]:
    return record.sample, record.question, record.answer, record.prompt_tokens, record.kept_share, record.kv_bytes


def test_writing_is_decoding_so_entries_leave_at_each_token() -> None:
    ids = torch.arange(5, 35).tolist()
    with torch.inference_mode(), compress(tiny_model(), "window", 7) as cache:
        reader = BatchReader(tiny_model(), cache, [ids[:10]])
        reader.write([ids[10:]])
        assert reader.seen == [30]
        assert cache.positions(0, 0)[0] == [*range(23, 30)]
    with torch.inference_mode(), compress(tiny_model(), "full") as cache:
        whole = BatchReader(tiny_model(), cache, [ids])
    with torch.inference_mode(), compress(tiny_model(), "full") as cache:
        steps = BatchReader(tiny_model(), cache, [ids[:10]])
        steps.write([ids[10:]])
        assert torch.allclose(whole.logits, steps.logits, atol=1e-9)


def test_the_oracle_looks_ahead_behind_written_text() -> None:
    task = TinyTask(items=with_text(tiny_samples(2)))
    records = examined(task, "oracle", "30%", "agnostic", 9)
    assert [record.failure for record in records] == [""] * len(records)
    assert all(0 < record.kept_share < 0.8 for record in records)


def test_a_text_that_passes_the_models_positions_is_a_failure_and_a_peer_is_not_asked() -> None:
    (sample,) = with_text(tiny_samples(1))
    (record, *_) = examined(TinyTask(items=(sample,)), "full", limit=30)
    assert record.failure == "a prompt of 34 tokens is longer than the model's 30 positions"
    (prompt,) = encode(sample, tiny_tokenizer(), "generate", "agnostic")
    assert misfit(prompt, None).startswith("a peer reads no text token by token")
    assert Cell("m", "full", "", "auto", "t", "agnostic", 0).key
