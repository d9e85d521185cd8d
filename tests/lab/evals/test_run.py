"""A run: cells, a folder that it can go on in, and what may not be mixed there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from millpond.errors import BudgetError, DataError, MillpondError, OptionError, UnsupportedModelError
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.run import fingerprint, run
from millpond_lab.evals.harness.store import ResumeWarning, RunStore
from millpond_lab.evals.spec import Spec, parse_specs, words
from millpond_lab.evals.task import TASKS, task
from tests.helpers.evals.small import TinyTask, tiny_model, tiny_samples, tiny_tokenizer
from tests.helpers.matrix.models import llama


@pytest.fixture(autouse=True)
def tiny_tasks() -> Iterator[None]:
    """Two tasks under names of their own, for the time of a test."""
    TASKS.names()

    @task("tiny")
    def tiny(extra: int = 0) -> TinyTask:
        """Answers by decoding."""
        return TinyTask(items=tiny_samples(4 + extra))

    @task("tiny_ppl")
    def tiny_ppl() -> TinyTask:
        """Perplexity."""
        return TinyTask("perplexity", tiny_samples(3, asks=(2,)))

    yield
    for name in ("tiny", "tiny_ppl"):
        del TASKS._entries[name]


def plan(**changes: Any) -> EvalPlan:
    return EvalPlan(
        **{
            "model": "tiny",
            "methods": parse_specs("full,h2o,window", "method"),
            "tasks": parse_specs("tiny", "tasks"),
            "budgets": ["30%", "7"],
            "samples": 3,
            "batch_size": 4,
            **changes,
        }
    )


def go(folder: Path, plan: EvalPlan, **options: Any) -> list[Any]:
    return run(plan, tiny_model(), tiny_tokenizer(), folder, **options)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_cells_are_every_combination_and_full_comes_once() -> None:
    cells = plan(tasks=parse_specs("tiny,tiny_ppl", "tasks"), codecs=["auto", "f32"], protocols=["turns", "aware"])
    found = [(c.task, c.protocol, c.method, c.budget, c.codec) for c in cells.cells()]
    assert len(found) == len(set(found)) == 2 * 2 * (1 + 2 + 2) * 2
    assert found[0] == ("tiny", "aware", "full", "", "auto")
    assert {b for _, _, m, b, _ in found if m == "full"} == {""}


def test_only_names_combinations_that_there_are() -> None:
    assert len(plan(only=[("h2o", "7", "auto")]).cells()) == 1
    with pytest.raises(OptionError, match=r"\('h2o', '8', 'auto'\) is no combination"):
        plan(only=[("h2o", "7", "auto"), ("h2o", "8", "auto")])


def test_specs_keep_colons_inside_values() -> None:
    spec = Spec.parse("book:file=C:/a:b.txt:length=4096")
    assert spec.options == {"file": "C:/a:b.txt", "length": "4096"}
    assert Spec.parse(str(spec)) == spec
    assert words(" a, b,a ,", "x") == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"methods": [Spec("h20")]}, "unknown method 'h20'; did you mean 'h2o'"),
        ({"methods": [Spec("h2o", {"recen": "1"})]}, "did you mean 'recent'"),
        ({"methods": [Spec("full")]}, "none of the methods"),
        ({"tasks": [Spec("tinny")]}, "did you mean 'tiny'"),
        ({"tasks": [Spec("tiny", {"extra": "x"})]}, "extra='x' is not a valid int"),
        ({"budgets": ["many"]}, "is not a budget"),
        ({"budgets": ["2"]}, "budget 2"),
        ({"codecs": ["int5"]}, "unknown codec"),
        ({"protocols": ["awere"]}, "did you mean 'aware'"),
        ({"samples": 0}, "samples=0"),
    ],
)
def test_everything_is_checked_before_a_model_is_loaded(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        plan(**changes)


@pytest.mark.parametrize("text", ["", ",", ":a=1", "a:b", "a:b=1:b=2"])
def test_what_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_specs(text, "method")


def test_records_rows_and_table_agree(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    rows = go(tmp_path, plan(), note={"command": "x"}, progress=lambda c, d, t: told.append((c.method, d, t)))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(r["method"], r["budget"]) for r in summary] == [(c.method, c.budget) for c in plan().cells()]
    for row, cell in zip(summary, plan().cells(), strict=True):
        own = [r for r in records(tmp_path) if r["cell"] == cell.key]
        assert row["n"] == len(own) == 9
        assert row["score"] == pytest.approx(sum(r["score"] for r in own) / 9)
        assert row["kv_bytes"] == pytest.approx(sum(r["kv_bytes"] for r in own) / 9)
        assert row["low"] <= row["score"] <= row["high"]
    assert [r.score for r in rows] == [r["score"] for r in summary]
    assert summary[0]["kept_share"] == 1 > summary[1]["kept_share"]
    assert "| tiny | aware | h2o | 30% |" in (tmp_path / "summary.md").read_text()
    assert told[0] == ("full", 0, 3)
    assert told[-1] == ("window", 3, 3)
    noted = json.loads((tmp_path / "run.json").read_text())["runs"][0]
    assert noted["command"] == "x"
    assert noted["torch"] == torch.__version__


def test_a_run_that_was_interrupted_gives_what_one_run_gives(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    both = plan(tasks=parse_specs("tiny,tiny_ppl", "tasks"))
    go(whole, both)
    calls = 0

    def pull_the_plug(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(parts, both, progress=pull_the_plug)
    begun = (parts / "samples.jsonl").read_bytes()
    assert 0 < begun.count(b"\n") < len(records(whole))
    (parts / "samples.jsonl").write_bytes(begun[:-20])
    with pytest.warns(ResumeWarning, match="half written"):
        go(parts, both)
    assert records(parts) == records(whole)
    assert (parts / "summary.json").read_text() == (whole / "summary.json").read_text()


def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = go(tmp_path, plan())
    before = (tmp_path / "samples.jsonl").read_bytes()
    monkeypatch.setattr("millpond_lab.evals.harness.run.Evaluator.examine", lambda *_: pytest.fail("examined again"))
    assert go(tmp_path, plan(batch_size=2)) == first
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def test_cells_can_be_added_and_the_summary_holds_all(tmp_path: Path) -> None:
    first = go(tmp_path, plan(methods=[Spec("full")], budgets=None))
    rows = go(tmp_path, plan(methods=[Spec("window")], tasks=parse_specs("tiny_ppl,tiny", "tasks")))
    assert rows[0] == first[0]
    assert [(r.method, r.task) for r in rows[1:]] == [("window", "tiny_ppl")] * 2 + [("window", "tiny")] * 2
    assert [r.better for r in rows] == ["higher", "lower", "lower", "higher", "higher"]


@pytest.mark.parametrize("changes", [{"samples": 2}, {"seed": 3}, {"model": "other"}, {"dtype": "f32"}])
def test_another_setting_needs_another_folder(tmp_path: Path, changes: dict[str, Any]) -> None:
    go(tmp_path, plan(methods=[Spec("full")], budgets=None))
    name = next(iter(changes))
    with pytest.raises(OptionError, match=f"{name}=.*another folder"):
        go(tmp_path, plan(methods=[Spec("full")], budgets=None, **changes))


def test_other_weights_or_other_samples_under_the_same_name_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = plan(methods=[Spec("full")], budgets=None)
    go(tmp_path, one)
    other = llama("gqa", dtype=torch.float32)
    assert fingerprint(other) != fingerprint(tiny_model()) == fingerprint(tiny_model())
    with pytest.raises(OptionError, match="weights="):
        run(one, other, tiny_tokenizer(), tmp_path)
    changed = [replace(s, context=s.context + " w9") for s in tiny_samples(3)]
    monkeypatch.setattr(TinyTask, "samples", lambda *_: iter(changed))
    with pytest.raises(OptionError, match="samples of task 'tiny' are not those"):
        go(tmp_path, one)


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("run.json", "{", "run.json cannot be read"),
        ("run.json", "[]", "is not a run"),
        ("samples.jsonl", "{}\n", "samples.jsonl, line 1 is not a record"),
        ("samples.jsonl", "nonsense\n", "line 1"),
    ],
)
def test_a_broken_folder_is_a_data_error(tmp_path: Path, file: str, text: str, match: str) -> None:
    one = plan(methods=[Spec("full")], budgets=None)
    go(tmp_path, one)
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match=match):
        go(tmp_path, one)


def test_records_without_their_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(DataError, match=r"without run\.json"):
        RunStore.open(tmp_path, {})


@pytest.mark.parametrize(
    ("items", "match"),
    [
        ((), "has no sample"),
        ((*tiny_samples(1), *tiny_samples(1)), "the same id"),
        ((replace(tiny_samples(1)[0], questions=()),), "asks nothing"),
    ],
)
def test_a_task_without_proper_samples_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, items: Any, match: str
) -> None:
    monkeypatch.setattr(TinyTask, "samples", lambda *_: iter(items))
    with pytest.raises(MillpondError, match=match):
        go(tmp_path, plan())


def test_a_budget_too_small_for_one_prompt_only_is_a_failure_of_that_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millpond_lab.evals.candidates.candidate import Compressed

    opened = Compressed.open

    def picky(self: Compressed, model: Any, tokenizer: Any, batch: Any, budget: str, codec: str) -> Any:
        if any(p.sample.id == "s1" for p in batch.prompts):
            raise BudgetError("too small for s1")
        return opened(self, model, tokenizer, batch, budget, codec)

    monkeypatch.setattr(Compressed, "open", picky)
    (row,) = go(tmp_path, plan(methods=[Spec("window")], budgets=["9"]))
    assert (row.n, row.failures) == (9, 3)
    assert {r["sample"] for r in records(tmp_path) if r["failure"]} == {"s1"}
    (ppl,) = go(tmp_path / "ppl", plan(methods=[Spec("window")], budgets=["9"], tasks=[Spec("tiny_ppl")]))
    own = [r for r in records(tmp_path / "ppl") if not r["failure"]]
    tokens = sum(r["weight"] for r in own)
    assert torch.tensor(sum(r["score"] * r["weight"] for r in own) / tokens).exp() == pytest.approx(ppl.score)


def test_an_unfinished_cell_is_not_in_the_summary_and_said_to_be_missing(tmp_path: Path) -> None:
    def stop(cell: Any, done: int, total: int) -> None:
        if cell.method == "h2o" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, plan(methods=[Spec("h2o")], budgets=["30%"], batch_size=1), progress=stop)
    with pytest.warns(ResumeWarning, match="1 combinations of an earlier run"):
        (row,) = go(tmp_path, plan(methods=[Spec("window")], budgets=["30%"]))
    assert row.method == "window"
    assert len(json.loads((tmp_path / "summary.json").read_text())) == 1


def test_a_method_that_this_model_cannot_run_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=8, n_layer=1, n_head=2, n_positions=512)).eval()
    one = plan(methods=parse_specs("window,streaming", "method"))
    with pytest.raises(UnsupportedModelError, match="no rotary position embedding"):
        run(one, gpt2, tiny_tokenizer(), tmp_path)
    assert not list(tmp_path.iterdir())
