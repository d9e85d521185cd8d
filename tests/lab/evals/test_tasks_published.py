"""Tasks over the published files that lie beside the checkout: every row is read, and a right answer scores 1."""

from __future__ import annotations

import pytest

from millpond_lab.evals.data import pond_tasks
from millpond_lab.evals.decoding.batch import encode
from tests.helpers.evals.task_help import build, data, draw, gpt2, total, word_tokenizer


@pytest.fixture(autouse=True)
def english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pond_tasks, "speaks_pond", lambda tokenizer: False)


@pytest.mark.parametrize(
    ("name", "file", "options", "rows"),
    [
        ("longbench", "longctx/longbench_multi_news.jsonl", {}, 200),
        ("longeval_lines", "longctx/200_lines.jsonl", {}, 50),
        ("longeval_lines", "longctx/400_lines.jsonl", {}, 50),
        ("longeval_topics", "longctx/5_topics.jsonl", {}, 50),
        ("kv_retrieval", "longctx/kv-retrieval-75_keys.jsonl.gz", {"gold": 74}, 500),
        ("h2o_summary", "tasks/xsum_0shot.jsonl", {}, 1000),
        ("h2o_summary", "tasks/cnndm_0shot.jsonl", {}, 1000),
        ("gsm8k", "tasks/gsm8k_test.jsonl", {"shots": 8}, 1311),
        ("lambada", "text/lambada_test.jsonl", {}, 5153),
    ],
)
def test_a_perfect_answer_to_every_row_scores_one(name: str, file: str, options: dict[str, int], rows: int) -> None:
    task = build(name, path=data(file), **options)
    samples = draw(task, word_tokenizer(), 10_000)
    assert len(samples) == rows
    for sample in samples:
        (question,) = sample.questions
        assert sample.context.strip()
        assert question.text.strip()
        assert task.score(question, question.references[0]) == pytest.approx(1.0)
        assert task.score(question, "") == 0.0


def test_lines_and_pairs_are_in_their_contexts() -> None:
    for name, file in (
        ("longeval_lines", "longctx/400_lines.jsonl"),
        ("longeval_topics", "longctx/5_topics.jsonl"),
        ("kv_retrieval", "longctx/kv-retrieval-75_keys.jsonl.gz"),
    ):
        for sample in draw(build(name, path=data(file)), word_tokenizer(), 50):
            assert sample.questions[0].references[0].lower() in sample.context.lower()
            assert sample.questions[0].references[0] not in sample.questions[0].text


@pytest.mark.parametrize(("file", "choices", "groups"), [("copa", 2, 100), ("openbookqa", 4, 500)])
def test_choices_of_every_question_rebuild_their_prompts(file: str, choices: int, groups: int) -> None:
    task = build("h2o_choice", path=data(f"tasks/{file}_5shot.jsonl"), choices=choices)
    samples = draw(task, word_tokenizer(), 10_000)
    assert len(samples) == groups
    for sample in samples:
        (question,) = sample.questions
        assert len({*question.choices}) == len(question.choices) == choices
        assert all(choice[0] == " " and choice.strip() for choice in question.choices)
        assert sample.context.count("\n\n") == 4


def test_piqa_and_mt_bench_are_whole() -> None:
    task = build("piqa", path=data("tasks/piqa_valid.jsonl"), labels=data("tasks/piqa_valid_labels.lst"))
    right = [sample.questions[0].right for sample in draw(task, word_tokenizer(), 10_000)]
    assert len(right) == 1838
    assert 0.45 < sum(right) / len(right) < 0.55
    assert len(draw(build("mt_bench", path=data("tasks/mt_bench.jsonl")), word_tokenizer(), 100)) == 79


def test_a_real_text_is_cut_into_windows_of_tokens() -> None:
    task = build("text", path=data("text/wikitext2_valid.txt"), context_len=256, continuation_len=64, stride=320)
    for sample in draw(task, gpt2(), 20):
        (prompt,) = encode(sample, gpt2(), task.kind, "agnostic")
        assert len(prompt.opening) + len(prompt.asked[0].tokens) == 256
        assert len(prompt.asked[0].targets[0]) == 64


def test_a_real_essay_fills_a_haystack() -> None:
    task = build("niah_single", length=4096, variant=2, essay=data("text/gutenberg/emma.txt"))
    (sample,) = draw(task, gpt2())
    assert 4080 <= total(gpt2(), sample) <= 4096
    assert sample.questions[0].references[0] in sample.context
