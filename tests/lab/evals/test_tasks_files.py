"""Tasks over files, on rows written here: prompts, references, metrics, and what is said of broken files."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from millpond.errors import DataError, OptionError
from millpond.install_command import install_command
from millpond_lab.evals.data import pond_tasks
from millpond_lab.evals.data.longbench_datasets import WAYS
from millpond_lab.evals.decoding.batch import encode
from tests.helpers.evals.task_help import build, count, draw, word_tokenizer, write_rows

TEXT = "The mill stands by the river. " * 20


@pytest.fixture(autouse=True)
def english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pond_tasks, "speaks_pond", lambda tokenizer: False)


def bench(dataset: str, answer: str, **more: Any) -> dict[str, Any]:
    row = {"input": "Who built it?", "context": TEXT, "answers": [answer], "dataset": dataset, "_id": "1"}
    return {**row, "length": 120, "language": "en", "all_classes": None, **more}


ANSWERS = {
    "trec": "Weather",
    "lsht": "Weather",
    "passage_count": "7",
    "passage_retrieval_en": "Paragraph 7",
    "passage_retrieval_zh": "段落7",
    "multifieldqa_zh": "老磨坊",
    "dureader": "老磨坊",
    "vcsum": "老磨坊",
    "lcc": "return mill(pond)",
    "repobench-p": "return mill(pond)",
}


@pytest.mark.parametrize("dataset", WAYS)
def test_every_dataset_of_longbench_is_asked_and_scored(dataset: str, tmp_path: Path) -> None:
    answer = ANSWERS.get(dataset, "Anna built the mill")
    classes = ["Weather", "Sport"] if dataset in ("trec", "lsht") else None
    path = write_rows(tmp_path / "rows.jsonl", [bench(dataset, answer, all_classes=classes)])
    task = build("longbench", path=path)
    (sample,) = draw(task, word_tokenizer())
    (question,) = sample.questions
    assert TEXT in sample.context
    assert sample.context.startswith(WAYS[dataset].before)
    assert ("Who built it?" in question.text) == ("{input}" in WAYS[dataset].after)
    assert "{" not in question.text
    assert sample.facts == {"dataset": dataset}
    assert task.score(question, answer) == pytest.approx(1.0)
    assert task.score(question, "") == 0.0
    first_line = task.score(question, f"\n{answer}\nand much more 8")
    assert (first_line == pytest.approx(1.0)) == (
        dataset in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
    )


def test_longbench_knows_21_datasets() -> None:
    assert len(WAYS) == 21


def test_longbench_cuts_the_middle_out_of_long_prompts(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl", [bench("trec", "Law", all_classes=["Law"], context="a b c " * 500 + "end")]
    )
    (sample,) = draw(build("longbench", path=path, max_tokens=200), word_tokenizer())
    (question,) = sample.questions
    used = count(word_tokenizer(), sample.context) + count(word_tokenizer(), question.text) + question.max_new_tokens
    assert 199 <= used <= 200
    assert sample.context.startswith(WAYS["trec"].before)
    assert sample.context.endswith("end")
    with pytest.raises(OptionError, match="raise max_tokens"):
        draw(build("longbench", path=path, max_tokens=20), word_tokenizer())


def test_the_seed_orders_the_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl.gz", [bench("qmsum", str(n), context=f"row {n}") for n in range(30)])
    task = build("longbench", path=path)
    ten = draw(task, word_tokenizer(), 10)
    assert draw(task, word_tokenizer(), 4) == ten[:4]
    assert len({sample.id for sample in ten}) == 10
    assert draw(task, word_tokenizer(), 10, seed=1) != ten
    assert len(draw(task, word_tokenizer(), 99)) == 30
    for sample in ten:
        assert sample.id == f"rows.jsonl.gz:{int(sample.questions[0].references[0]) + 1}"


def test_longeval(tmp_path: Path) -> None:
    lines = {
        "prompt": "line a: <5>\nline b: <77>\n\nNow the record is over. Which? ",
        "expected_number": 77,
        "num_lines": 2,
    }
    task = build("longeval_lines", path=write_rows(tmp_path / "lines.jsonl", [lines]))
    (sample,) = draw(task, word_tokenizer())
    assert sample.context + sample.questions[0].text == lines["prompt"].rstrip()
    assert sample.context.endswith("line b: <77>")
    assert sample.facts == {"lines": 2}
    assert task.score(sample.questions[0], "The number is <77>.") == 1.0
    assert task.score(sample.questions[0], "177") == 0.0
    topics = {
        "prompt": "USER: ... \n ASSISTANT: ... Now the record ends. What was first?",
        "topics": ["The art of rest", "x"],
    }
    task = build("longeval_topics", path=write_rows(tmp_path / "topics.jsonl", [topics]))
    (sample,) = draw(task, word_tokenizer())
    assert sample.questions[0].text == " Now the record ends. What was first?"
    assert task.score(sample.questions[0], "It was 'the art of rest'") == 1.0
    assert task.score(sample.questions[0], "the art of resting") == task.score(sample.questions[0], "") == 0.0
    with pytest.raises(DataError, match="field 'prompt' has no 'Now the record is over'"):
        draw(
            build("longeval_lines", path=write_rows(tmp_path / "x.jsonl", [{**lines, "prompt": "no mark"}])),
            word_tokenizer(),
        )


def test_kv_retrieval_moves_the_gold_pair(tmp_path: Path) -> None:
    row = {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"], ["k3", "v3"]], "key": "k1", "value": "v1"}
    path = write_rows(tmp_path / "kv.jsonl.gz", [row])
    for gold, order, depth in ((-1, "123", 0.0), (0, "123", 0.0), (1, "213", 0.5), (2, "231", 1.0)):
        task = build("kv_retrieval", path=path, gold=gold)
        (sample,) = draw(task, word_tokenizer())
        pairs = ",\n ".join(f'"k{n}": "v{n}"' for n in order)
        assert sample.context.endswith("\n{" + pairs + "}")
        assert sample.facts == {"pairs": 3, "depth": depth}
        assert task.score(sample.questions[0], ' "v1"') == 1.0
        assert task.score(sample.questions[0], ' "v2"') == task.score(sample.questions[0], "") == 0.0
    with pytest.raises(OptionError, match="gold=3, and row 1 has 3 pairs"):
        draw(build("kv_retrieval", path=path, gold=3), word_tokenizer())
    with pytest.raises(OptionError, match="gold=-2"):
        build("kv_retrieval", path=path, gold=-2)
    for bad, message in (({"key": "k9"}, "is not among"), ({"ordered_kv_records": [["k"]]}, r"\[key, value\] pairs")):
        with pytest.raises(DataError, match=message):
            draw(build("kv_retrieval", path=write_rows(tmp_path / "bad.jsonl", [{**row, **bad}])), word_tokenizer())


@pytest.mark.parametrize(
    ("way", "output", "right", "wrong"),
    [
        ("exam", "B", "(B) because", "C"),
        ("exam", "ACD", "A, C and D", "A, C"),
        ("exam", "(C) The third answer", "(C) The third answer", "(B)"),
        ("exam", "42", "So the answer is 42.", "It is 41"),
        ("exam", "True", "true.", "False"),
        ("f1", "the old mill", "An old mill", "river"),
        ("rouge", "the old mill stood", "the old mill stood", "rivers run"),
    ],
)
def test_leval_asks_all_about_one_document(way: str, output: str, right: str, wrong: str, tmp_path: Path) -> None:
    row = {"input": TEXT, "instructions": ["First?", "Second?"], "outputs": ["x", output], "evaluation": way}
    task = build("leval", path=write_rows(tmp_path / "leval.jsonl", [row]))
    (sample,) = draw(task, word_tokenizer())
    assert TEXT in sample.context
    assert [question.text.split("\n")[2] for question in sample.questions] == [
        "Instruction: First?",
        "Instruction: Second?",
    ]
    assert task.score(sample.questions[1], right) == pytest.approx(1.0)
    assert task.score(sample.questions[1], wrong) == task.score(sample.questions[1], "") == 0.0


def test_leval_refuses_what_it_cannot_judge(tmp_path: Path) -> None:
    row = {"input": TEXT, "instructions": ["First?"], "outputs": ["x"], "evaluation": "LLM"}
    for bad, message in (
        ({}, "needs a judge"),
        ({"evaluation": "f1", "outputs": ["x", "y"]}, "2 texts for 1 instructions"),
    ):
        with pytest.raises(DataError, match=message):
            draw(build("leval", path=write_rows(tmp_path / "leval.jsonl", [{**row, **bad}])), word_tokenizer())


COPA = [
    "It rained.\n\nShe left because it was late.",
    "It rained.\n\nShe left because it was dark and cold.",
    "It rained.\n\nHe sang.\n\nMen ran so",
    "It rained.\n\nHe sang.\n\nMen ran so fast",
]


def test_h2o_choices_are_grouped_and_divided(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "copa.jsonl", [{"prompt": prompt} for prompt in COPA])
    (tmp_path / "labels").write_text("1\n0\n")
    task = build("h2o_choice", path=path, labels=str(tmp_path / "labels"))
    assert task.kind == "choice"
    found = {sample.id: sample for sample in draw(task, word_tokenizer(), 9)}
    first, second = found["copa.jsonl:1"], found["copa.jsonl:3"]
    assert (first.context, first.questions[0].text) == ("It rained.", "\n\nShe left because it was")
    assert (first.questions[0].choices, first.questions[0].right) == ((" late.", " dark and cold."), 1)
    assert (second.context, second.questions[0].text) == ("It rained.\n\nHe sang.", "\n\nMen ran")
    assert (second.questions[0].choices, second.questions[0].right) == ((" so", " so fast"), 0)
    without = build("h2o_choice", path=path)
    assert without.kind == "fidelity"
    assert {s.questions[0].references for s in draw(without, word_tokenizer(), 9)} == {(" late.",), (" so",)}


def test_h2o_choices_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "copa.jsonl", [{"prompt": prompt} for prompt in COPA])
    (tmp_path / "labels").write_text("1\n")
    for options, message in (
        ({"choices": 3}, "4 rows, which are no whole groups of 3"),
        ({"choices": 4}, "shares no question with the next rows; is it 4 rows"),
        ({"labels": str(tmp_path / "labels")}, "1 lines for 2 questions"),
    ):
        with pytest.raises(DataError, match=message):
            draw(build("h2o_choice", path=path, **options), word_tokenizer(), 9)
    (tmp_path / "labels").write_text("1\n2\n")
    with pytest.raises(DataError, match="line 2: '2' must be a choice, 0 to 1"):
        draw(build("h2o_choice", path=path, labels=str(tmp_path / "labels")), word_tokenizer())


def test_h2o_summaries(tmp_path: Path) -> None:
    ask = "\n\nSummarize the above article in 1 sentence.\n"
    rows = [
        {"article": f"###\nArticle: {TEXT}{ask}", "summary_gt": "A mill.", "max_tokens": 64, "stop": ["###"]},
        {"article": f"###\nArticle: {TEXT}", "summary_gt": "A mill."},
    ]
    task = build("h2o_summary", path=write_rows(tmp_path / "sum.jsonl", rows))
    found = {sample.id: sample for sample in draw(task, word_tokenizer(), 2)}
    assert found["sum.jsonl:1"].context == f"###\nArticle: {TEXT}"
    assert found["sum.jsonl:1"].questions[0].text == ask
    assert "3 sentences" in found["sum.jsonl:2"].questions[0].text
    for sample in found.values():
        (question,) = sample.questions
        assert (question.max_new_tokens, question.stop) == (64, ("###",))
        assert task.score(question, "a mill") == 1.0
        assert task.score(question, "") == 0.0


def test_piqa(tmp_path: Path) -> None:
    row = {"goal": "open it", "sol1": "push", "sol2": "pull"}
    (tmp_path / "labels.lst").write_text("1\n")
    for path, labels in (
        (write_rows(tmp_path / "a.jsonl", [row]), str(tmp_path / "labels.lst")),
        (write_rows(tmp_path / "b.jsonl", [{**row, "label": 1}]), ""),
    ):
        task = build("piqa", path=path, labels=labels)
        (question,) = draw(task, word_tokenizer())[0].questions
        assert task.kind == "choice"
        assert (question.choices, question.right, question.references) == ((" push", " pull"), 1, (" pull",))
    for label in ({}, {"label": 2}):
        with pytest.raises(DataError, match="field 'label' must be 0 or 1, unless"):
            draw(build("piqa", path=write_rows(tmp_path / "c.jsonl", [{**row, **label}])), word_tokenizer())


def test_endings_are_those_of_paragraphs(tmp_path: Path) -> None:
    texts = [" ".join(f"p{n}w{word}" for word in range(5 + n % 2)) for n in range(12)]
    path = tmp_path / "novel.txt"
    path.write_text("\n\n".join(["too short", *texts]).replace("w2 ", "w2\n"))
    task = build("endings", path=str(path), shots=2, choices=3, beginning=3, ending=2)
    samples = draw(task, word_tokenizer(), 20)
    assert task.kind == "choice"
    assert len({sample.id for sample in samples}) == len(samples) == len(texts), "a question of each paragraph"
    for sample in samples:
        (question,) = sample.questions
        paragraph = f"p{sample.facts['paragraph']}"
        assert question.text == f"\n\n{paragraph}w0 {paragraph}w1 {paragraph}w2"
        assert question.choices[question.right] == f" {paragraph}w3 {paragraph}w4"
        assert all(re.fullmatch(r" (p\d+)w3 \1w4", choice) for choice in question.choices)
        shown = re.findall(r"p\d+", sample.context + "".join(question.choices))
        assert len(set(shown)) == 5, "two examples and three choices are of paragraphs of their own"
        assert paragraph not in sample.context
        assert sample.context.count("\n\n") == 1
    assert len({sample.questions[0].right for sample in samples}) == 3
    with pytest.raises(DataError, match="12 paragraphs of 5 words or more, and a question takes 14"):
        draw(build("endings", path=str(path), shots=11, choices=3, beginning=3, ending=2), word_tokenizer())
    with pytest.raises(OptionError, match="decodes no answer"):
        task.score(samples[0].questions[0], "p1w3")


def test_lambada(tmp_path: Path) -> None:
    rows = [{"text": '"Stay," he said. "The tide is high." Nobody left the pier'}, {"text": "one two three four five"}]
    task = build("lambada", path=write_rows(tmp_path / "l.jsonl", rows))
    found = {sample.id: sample for sample in draw(task, word_tokenizer(), 2)}
    first, second = found["l.jsonl:1"], found["l.jsonl:2"]
    assert (first.context, first.questions[0].text) == ('"Stay," he said. "The tide is high."', " Nobody left the")
    assert first.questions[0].references == ("pier",)
    assert second.context + second.questions[0].text == "one two three four"
    assert second.questions[0].text.strip()
    for answer, score in ((" pier.", 1.0), (' "Pier"', 1.0), (" piers", 0.0), ("", 0.0), (" old pier", 0.0)):
        assert task.score(first.questions[0], answer) == score
    with pytest.raises(DataError, match="must be at least two words"):
        draw(build("lambada", path=write_rows(tmp_path / "x.jsonl", [{"text": "alone"}])), word_tokenizer())


def test_gsm8k(tmp_path: Path) -> None:
    rows = [
        {"question": f"{n} and {n}?", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"} for n in range(4)
    ]
    path = write_rows(tmp_path / "g.jsonl", rows)
    task = build("gsm8k", path=path, shots=2)
    samples = draw(task, word_tokenizer(), 9)
    assert {sample.questions[0].references for sample in samples} == {("4",), ("6",)}
    for sample in samples:
        assert sample.context.count("Question:") == 2
        assert "<<" not in sample.context
        assert "1+1=2\nThe result is 2." in sample.context
        assert task.score(sample.questions[0], f"so {sample.questions[0].references[0]}.") == 1.0
        assert task.score(sample.questions[0], "") == 0.0
    assert len(draw(build("gsm8k", path=path, shots=0), word_tokenizer(), 9)) == 4
    with pytest.raises(OptionError, match="shots=9 must be 0 to 8"):
        build("gsm8k", path=path, shots=9)
    with pytest.raises(DataError, match="first 4 are examples; lower shots"):
        draw(build("gsm8k", path=path, shots=4), word_tokenizer())
    with pytest.raises(DataError, match="no number after ####"):
        draw(
            build("gsm8k", path=write_rows(tmp_path / "x.jsonl", [{"question": "?", "answer": "5"}]), shots=0),
            word_tokenizer(),
        )


def test_mt_bench(tmp_path: Path) -> None:
    rows = [{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}]
    path = write_rows(tmp_path / "q.jsonl", rows)
    task = build("mt_bench", path=path)
    assert task.kind == "fidelity"
    (sample,) = draw(task, word_tokenizer())
    assert (sample.context, sample.questions[0].references) == ("User: Write.", (" Again.",))
    given = write_rows(tmp_path / "a.jsonl", [{"question_id": 81, "choices": [{"turns": ["One.", "Two."]}]}])
    (sample,) = draw(build("mt_bench", path=path, answers=given), word_tokenizer())
    assert sample.context == "User: Write.\n\nAssistant: One."
    assert (sample.questions[0].text, sample.questions[0].references) == ("\n\nUser: Again.\n\nAssistant:", (" Two.",))
    other = write_rows(tmp_path / "b.jsonl", [{"question_id": 80, "choices": [{"turns": ["One.", "Two."]}]}])
    with pytest.raises(DataError, match="no answer to question_id 81"):
        draw(build("mt_bench", path=path, answers=other), word_tokenizer())


@pytest.mark.parametrize("name", ["text", "fidelity"])
def test_windows_over_a_text(name: str, tmp_path: Path) -> None:
    words = [f"w{n}" for n in range(1000)]
    (tmp_path / "t.txt").write_text("\n ".join(words))
    task = build(name, path=str(tmp_path / "t.txt"), context_len=40, continuation_len=10, stride=25)
    assert task.kind == {"text": "perplexity", "fidelity": "fidelity"}[name]
    samples = draw(task, word_tokenizer(), 99, seed=3)
    assert draw(task, word_tokenizer(), 5, seed=3) == samples[:5]
    assert draw(task, word_tokenizer(), 5, seed=4) != samples[:5]
    starts = []
    for sample in samples:
        (question,) = sample.questions
        (rest,) = question.references
        read = (sample.context + rest).split()
        starts.append(words.index(read[0]))
        assert read == words[starts[-1] : starts[-1] + 50]
        assert len(sample.context.split()) == 40
        assert rest[0].isspace()
    turn = starts.index(0)
    assert 36 <= len(samples) <= 40
    assert all(b - a == 25 for a, b in itertools.pairwise(starts) if b != 0)
    assert turn > 0
    with pytest.raises(DataError, match="too short for context_len=2000"):
        draw(build(name, path=str(tmp_path / "t.txt"), context_len=2000), word_tokenizer())
    with pytest.raises(OptionError, match="decodes no answer"):
        task.score(samples[0].questions[0], "")
    with pytest.raises(OptionError, match="stride=0 must be 1 to 16,777,216"):
        build(name, stride=0)


@pytest.mark.parametrize("words", ["short words on a river ", "a_long_word_of_many_marks," * 9 + "\n", "磨坊老池塘"])
def test_all_tokens_that_were_asked_for_are_scored_however_long_words_are(words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text(words * 400)
    tokenizer = characters()
    task = build("text", path=str(path), context_len=40, continuation_len=32, stride=50)
    samples = draw(task, tokenizer, 12)
    assert len(samples) == len({sample.id for sample in samples}) == 12
    for sample in samples:
        (prompt,) = encode(sample, tokenizer, "perplexity", "aware")
        (asked,) = prompt.asked
        context, (target,) = [*prompt.opening, *asked.tokens], asked.targets
        assert (len(context), len(target)) == (41, 32)
        read = tokenizer.decode([*context, *target]).removeprefix("<bos>")
        whole = (words * 400)[int(sample.id) :]
        assert whole.encode().startswith(read.removesuffix("\ufffd").encode())


def characters() -> PreTrainedTokenizerBase:
    """A token for every byte, and a mark before each text."""
    marks = {byte: place for place, byte in enumerate(sorted(ByteLevel.alphabet()))}
    core = Tokenizer(BPE({**marks, "<bos>": 256}, [], byte_fallback=False))
    core.pre_tokenizer, core.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    core.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>")


FILE_TASKS = [
    "endings",
    "fidelity",
    "gsm8k",
    "h2o_choice",
    "h2o_summary",
    "kv_retrieval",
    "lambada",
    "leval",
    "longbench",
]
FILE_TASKS += ["longeval_lines", "longeval_topics", "mt_bench", "piqa", "qa", "text"]


@pytest.mark.parametrize("name", FILE_TASKS)
def test_a_file_that_is_no_good_is_named_with_its_row(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none was named; add path=FILE"):
        draw(build(name), word_tokenizer())
    with pytest.raises(DataError, match=r"nowhere\.jsonl cannot be read"):
        draw(build(name, path=str(tmp_path / "nowhere.jsonl")), word_tokenizer())
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no"):
        draw(build(name, path=str(tmp_path / "empty.jsonl")), word_tokenizer())
    if name in ("endings", "text", "fidelity"):
        return
    (tmp_path / "broken.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"broken\.jsonl, row 2: not JSON"):
        draw(build(name, path=str(tmp_path / "broken.jsonl")), word_tokenizer())
    options = {"shots": 0} if name == "gsm8k" else {}
    path = write_rows(tmp_path / "fields.jsonl", [{"other": 1}, {"other": 2}])
    with pytest.raises(DataError, match=r"fields\.jsonl, row \d: field '\w+' (is missing \(it has other\)|must be)"):
        draw(build(name, path=path, **options), word_tokenizer())


def test_files_that_are_not_what_they_seem(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(DataError, match="cannot be read"):
        draw(build("piqa", path=str(tmp_path / "cut.jsonl.gz")), word_tokenizer())
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    with pytest.raises(DataError, match=r"row 1: '\[1, 2\]' is not an object"):
        draw(build("piqa", path=str(tmp_path / "list.jsonl")), word_tokenizer())
    (tmp_path / "whole.json").write_text('[{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}]')
    assert len(draw(build("piqa", path=str(tmp_path / "whole.json")), word_tokenizer(), 5)) == 1
    row = {"goal": "", "sol1": "a", "sol2": ["b"], "label": "x"}
    for bad, message in (
        ({}, "'x', not a whole number"),
        ({"label": 0}, "'sol2' is of type list, and must be text"),
        ({"label": 0, "sol2": "b"}, "'goal' is empty"),
    ):
        with pytest.raises(DataError, match=message):
            draw(build("piqa", path=write_rows(tmp_path / "bad.jsonl", [{**row, **bad}])), word_tokenizer())


def test_parquet_without_its_library_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=re.escape(install_command("eval"))):
        draw(build("piqa", path=str(tmp_path / "x.parquet")), word_tokenizer())


def test_parquet_is_read_where_the_library_is(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    rows = [{"goal": "g", "sol1": "a", "sol2": "b", "label": n} for n in (0, 1)]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "x.parquet"))
    found = draw(build("piqa", path=str(tmp_path / "x.parquet")), word_tokenizer(), 5)
    assert {sample.id: sample.questions[0].right for sample in found} == {"x.parquet:1": 0, "x.parquet:2": 1}
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read as Parquet"):
        draw(build("piqa", path=str(tmp_path / "bad.parquet")), word_tokenizer())
