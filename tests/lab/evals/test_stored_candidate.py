"""Texts that were stored and restored before a question, as a candidate of an evaluation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millpond.errors import OptionError
from millpond_lab.evals.candidates.candidate import find_candidate
from millpond_lab.evals.candidates.stored import Stored
from millpond_lab.evals.decoding.batch import batches, encode
from millpond_lab.evals.decoding.prompt_recording import PromptRecordings
from millpond_lab.evals.decoding.record import CLAIMED, Record
from millpond_lab.evals.harness.evaluator import Evaluator
from millpond_lab.evals.spec import Spec
from tests.helpers.evals.small import TinyTask, text, tiny_samples, tiny_tokenizer
from tests.helpers.hf.transform import tiny, transform_of_tiny


def answers(bits: float | None, size: int, recordings: PromptRecordings | None = None) -> list[Record]:
    long = [replace(sample, context=text(600 + 50 * i, i)) for i, sample in enumerate(tiny_samples(3))]
    task, model = TinyTask(items=tuple(long)), tiny("gqa")
    who = find_candidate(Spec.parse("full")) if bits is None else Stored(f"transform:{bits}", transform_of_tiny("gqa"))
    examiner = Evaluator("cell", model, tiny_tokenizer(), task, who, "", "auto", 1024, recordings)
    prompts = [p for s in task.items for p in encode(s, tiny_tokenizer(), task.kind, "agnostic")]
    return [r for batch in batches(prompts, task.kind, "agnostic", size) for r in examiner.examine(batch)]


def test_a_text_is_stored_once_and_answers_come_from_what_was_restored() -> None:
    alone = answers(4, 1)
    assert not any(record.failure for record in alone)
    assert alone == answers(4, 12), "a file holds one text, whatever is read together"
    assert alone == answers(4, 12, PromptRecordings(hidden=False)), "the queries are seen where nothing is computed"
    assert {record.kept_share for record in alone} == {1.0}
    shares = {bits: {record.extra[CLAIMED] for record in answers(bits, 1)} for bits in (1, 4)}
    assert max(shares[1]) < min(shares[4])


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(OptionError):
        find_candidate(Spec.parse("stored:bits=9"))
    with pytest.raises(OptionError, match="stored with codec 'int4': it has a format of its own"):
        find_candidate(Spec.parse("stored")).check("", "int4")
