"""Any batch size, the same records; one prompt's trouble is not another's."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.errors import BudgetError, OptionError, PoolFullError
from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond_lab.evals.candidates.candidate import Compressed
from millpond_lab.evals.decoding.batch import BatchReader, PromptBatch, batches, encode
from millpond_lab.evals.decoding.record import Protocol, Record
from millpond_lab.evals.harness.evaluator import Evaluator
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.pond.words import build_tokenizer
from tests.helpers.evals.small import TinyTask, examined, tiny_model, tiny_samples, tiny_tokenizer

PROTOCOLS: list[Protocol] = ["aware", "agnostic", "turns"]
METHODS = [("full", ""), ("h2o", "30%"), ("window", "7"), ("snapkv:window=4", "30%"), ("tova", "9"), ("h2o", "24KiB")]


def assert_same(one: list[Record], other: list[Record]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.sample, a.question, a.answer, a.prompt_tokens) == (b.sample, b.question, b.answer, b.prompt_tokens)
        assert (a.kept_share, a.kv_bytes, a.full_kv_bytes) == (b.kept_share, b.kv_bytes, b.full_kv_bytes)
        assert a.score == pytest.approx(b.score, abs=1e-9)
        assert a.extra == pytest.approx(b.extra, abs=1e-9)


@pytest.mark.covering
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("method", "budget"), METHODS)
def test_answers_do_not_depend_on_the_batch(method: str, budget: str, protocol: Protocol) -> None:
    task = TinyTask(items=tiny_samples(4))
    alone = examined(task, method, budget, protocol, size=1)
    assert len({r.answer for r in alone}) > 6
    assert_same(alone, examined(task, method, budget, protocol, size=12))


@pytest.mark.covering
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", ["choice", "perplexity", "fidelity"])
def test_likelihoods_do_not_depend_on_the_batch(kind: str, protocol: Protocol) -> None:
    task = TinyTask(kind, tiny_samples(3))
    assert_same(examined(task, "h2o", "30%", protocol, 1), examined(task, "h2o", "30%", protocol, 27))


@pytest.mark.parametrize(("method", "budget"), METHODS)
def test_what_is_held_is_what_the_cache_holds(method: str, budget: str) -> None:
    openings = [[5, 6, 7] * 9, [8, 9] * 25]
    options = {"window": 4} if ":" in method else {}
    with compress(tiny_model(), method.split(":")[0], budget or None, **options) as cache:
        reader = BatchReader(tiny_model(), cache, openings)
        held, stats = reader.held(), cache.stats()
        assert sum(h.kv_bytes for h in held) == stats.kv_bytes
        assert sum(h.full_kv_bytes for h in held) == stats.full_kv_bytes
        assert reader.seen == stats.seen == [27, 50]


def test_a_batch_holds_as_many_rows_as_its_size_allows() -> None:
    samples = tiny_samples(5)
    tokenizer = tiny_tokenizer()
    for protocol, kind, size, expected in [
        ("agnostic", "generate", 6, [2, 2, 1]),
        ("agnostic", "generate", 1, [1] * 5),
        ("turns", "generate", 3, [3, 2]),
        ("aware", "choice", 6, [2] * 7 + [1]),
    ]:
        prompts = [p for s in samples for p in encode(s, tokenizer, kind, protocol)]
        assert [len(b.prompts) for b in batches(prompts, kind, protocol, size)] == expected


class Picky(Compressed):
    """Refuses a batch that holds a certain prompt."""

    def open(self, model: Any, tokenizer: Any, batch: PromptBatch, budget: str, codec: str) -> MillpondCache:
        for prompt in batch.prompts:
            if prompt.sample.id == "s1":
                raise BudgetError("s1 does not fit")
            if prompt.sample.id == "s2":
                raise PoolFullError("s2 is too much")
        return super().open(model, tokenizer, batch, budget, codec)


def test_one_prompt_that_fails_does_not_take_the_others_along() -> None:
    task = TinyTask(items=tiny_samples(4))
    examiner = Evaluator("cell", tiny_model(), tiny_tokenizer(), task, Picky("window"), "9", "auto", 512)
    prompts = [p for s in task.items for p in encode(s, tiny_tokenizer(), "generate", "agnostic")]
    (batch,) = batches(prompts, "generate", "agnostic", 12)
    records = examiner.examine(batch)
    assert [r.sample for r in records] == [f"s{i}" for i in range(4) for _ in range(3)]
    wrong = {r.sample: r.failure for r in records if r.failure}
    assert wrong == {"s1": "BudgetError: s1 does not fit", "s2": "PoolFullError: s2 is too much"}
    right = [r for r in records if not r.failure]
    assert_same(right, [r for r in examined(task, "window", "9", "agnostic") if r.sample not in wrong])


def test_a_text_that_the_tokenizer_does_not_know_is_refused() -> None:
    tokenizer = build_tokenizer(64)
    foreign = Sample("s", "Once upon a midnight dreary, while I pondered, weak and weary", (Question(" why"),))
    with pytest.raises(OptionError, match="knows no word for 9 of its 12 tokens"):
        encode(foreign, tokenizer, "generate", "agnostic")
    assert encode(Sample("s", "anna kettle rain", (Question(" why"),)), tokenizer, "generate", "agnostic")
