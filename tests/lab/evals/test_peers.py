"""Peers: the requests, the child process, and its answers scored beside ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from millpond.cli.app import app
from millpond.errors import DataError, MillpondError, OptionError
from millpond_lab.evals.decoding.batch import encode
from millpond_lab.evals.decoding.record import Cell
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.run import run
from millpond_lab.evals.harness.summary import read_rows, read_samples
from millpond_lab.evals.peers.process import ReplyFile, RestartingPeer, reply_of, request_of
from millpond_lab.evals.peers.run import PeerPlan, export, run_peer
from millpond_lab.evals.report.leaderboard import render
from millpond_lab.evals.spec import parse_specs
from millpond_lab.evals.task import TASKS, task
from millpond_lab.peer_process import PeerError
from tests.helpers.evals.small import TinyTask, save_tiny, tiny_model, tiny_samples, tiny_tokenizer, with_stop

FAKE = [sys.executable, str(Path(__file__).parents[2] / "helpers" / "evals" / "fake_peer.py")]
KVPRESS = Path(__file__).parents[3] / "build" / "kvpress" / "bin" / "python"
CELL = Cell("tiny", "SnapKVPress", "30%", "auto", "tiny", "agnostic", 0, "fake 1.0")


@pytest.fixture(autouse=True)
def tiny_tasks() -> Iterator[None]:
    TASKS.names()

    @task("tiny")
    def tiny() -> TinyTask:
        """Answers by decoding."""
        return TinyTask(items=with_stop(tiny_samples(4), "w5"))

    @task("tiny_ppl")
    def tiny_ppl() -> TinyTask:
        """Perplexity."""
        return TinyTask("perplexity", tiny_samples(3, asks=(2,)))

    @task("tiny_long")
    def tiny_long() -> TinyTask:
        """Longer than any window."""
        items = tuple(replace(s, context=" ".join([s.context] * 4)) for s in tiny_samples(3))
        return TinyTask(items=items)

    yield
    for name in ("tiny", "tiny_ppl", "tiny_long"):
        del TASKS._entries[name]


def plan(methods: str = "full,SnapKVPress", peer: str = "fake 1.0", **changes: Any) -> PeerPlan:
    return PeerPlan(
        **{
            "model": "tiny",
            "methods": parse_specs(methods, "method"),
            "tasks": parse_specs("tiny", "tasks"),
            "budgets": ["30%"],
            "samples": 3,
            "batch_size": 1,
            "peer": peer,
            **changes,
        }
    )


def go(folder: Path, plan: PeerPlan, **options: Any) -> list[Any]:
    with RestartingPeer(FAKE, list(map(str, plan.methods))) as child:
        return run_peer(plan, child, tiny_model(), tiny_tokenizer(), folder, **options)


def test_a_request_is_the_prompt_that_we_read_ourselves() -> None:
    sample = with_stop(tiny_samples(1), "w5")[0]
    (prompt,) = encode(sample, tiny_tokenizer(), "generate", "agnostic")
    request = json.loads(json.dumps(request_of(CELL, prompt, frozenset({7, 2}), 40)))
    ids = tiny_tokenizer()(sample.context)["input_ids"]
    assert request["opening"] == ids
    assert request["keep"] == round(0.3 * len(ids))
    assert [q["tokens"] for q in request["questions"]] == [list(a.tokens) for a in prompt.asked]
    assert [q["most"] for q in request["questions"]] == [
        min(q.max_new_tokens, 40 - len(ids) - len(a.tokens) + 1)
        for q, a in zip(sample.questions, prompt.asked, strict=True)
    ]
    assert request["questions"][1]["references"] == list(sample.questions[1].references)
    assert request["questions"][0]["stop"] == ["w5"]
    assert request["eos"] == [2, 7]
    assert request_of(replace(CELL, budget="4KiB"), prompt, frozenset(), None)["bytes"] == 4096
    assert request_of(replace(CELL, budget=""), prompt, frozenset(), None)["keep"] is None
    aware = encode(sample, tiny_tokenizer(), "generate", "aware")
    assert len({request_of(CELL, one, frozenset(), None)["id"] for one in aware}) == len(sample.questions)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ({"id": "x", "error": "no memory"}, "no memory"),
        ({"id": "y"}, "is to 'y'"),
        ({"id": "x"}, "not a reply: KeyError"),
        ([], "not a reply"),
        ({"id": "x", "answers": [], "kept_share": 1, "kv_bytes": 1, "full_kv_bytes": 1}, "0 answers to 1 questions"),
    ],
)
def test_a_reply_that_is_none_is_said_to_be_none(line: Any, match: str) -> None:
    with pytest.raises(PeerError, match=match):
        reply_of({"id": "x", "questions": [{}]}, line)


def test_answers_are_scored_by_our_tasks_and_stand_in_our_folder(tmp_path: Path) -> None:
    ours = EvalPlan("tiny", parse_specs("full,h2o", "method"), parse_specs("tiny", "tasks"), ["30%"], samples=3)
    run(ours, tiny_model(), tiny_tokenizer(), tmp_path)
    told: list[Any] = []
    rows = go(tmp_path, plan(), progress=lambda cell, done, total: told.append((cell.method, done, total)))
    assert [(r.peer, r.method) for r in rows] == [
        ("millpond", "full"),
        ("millpond", "h2o"),
        ("fake 1.0", "full"),
        ("fake 1.0", "SnapKVPress"),
    ]
    assert rows == read_rows(tmp_path)
    assert told[0] == ("full", 0, 3)
    assert told[-1] == ("SnapKVPress", 3, 3)
    mine = {
        (r.sample, r.question): r for r in read_samples(tmp_path) if r.cell.endswith("30%|auto|tiny|aware|0|millpond")
    }
    theirs = [r for r in read_samples(tmp_path) if "SnapKVPress" in r.cell]
    samples = {s.id: s for s in with_stop(tiny_samples(3), "w5")}
    for record in theirs:
        words = f"{samples[record.sample].context}{samples[record.sample].questions[record.question].text}".split()
        said = words[:-1][-samples[record.sample].questions[record.question].max_new_tokens :]
        assert record.answer == " ".join(said).split("w5")[0]
        own = mine[record.sample, record.question]
        assert record.prompt_tokens == own.prompt_tokens
        assert record.kept_share == pytest.approx(own.kept_share)
    page = render(rows)
    assert "`SnapKVPress` (fake 1.0)" in page
    assert "| SnapKVPress (fake 1.0) |" in (tmp_path / "summary.md").read_text()
    assert json.loads((tmp_path / "run.json").read_text())["runs"][-1]["peer"] == "fake"


def test_a_peer_that_masks_is_said_to_mask_also_when_we_go_on(tmp_path: Path) -> None:
    (row,) = go(tmp_path, plan("AdaKVPress(SnapKVPress)"))
    assert row.masks_only
    assert row.kv_bytes == row.full_kv_bytes
    assert row.extra["pretended_share"] == pytest.approx(0.3, abs=0.02)
    ours = EvalPlan("tiny", parse_specs("full", "method"), parse_specs("tiny", "tasks"), samples=3)
    again = run(ours, tiny_model(), tiny_tokenizer(), tmp_path)
    assert [r.masks_only for r in again] == [True, False]
    assert "AdaKVPress(SnapKVPress) (fake 1.0), masks only" in (tmp_path / "summary.md").read_text()
    assert "really held" in render(again)


@pytest.mark.parametrize(
    ("press", "failures", "match"),
    [
        ("refuses", 9, "fake 1.0: AssertionError: window too long"),
        ("garbled", 9, "the reply is to 'another'"),
        ("half", 9, "no hyperplane"),
        ("dies", 3, "exit status 3"),
    ],
)
def test_a_peer_that_fails_is_a_counted_failure(tmp_path: Path, press: str, failures: int, match: str) -> None:
    (row,) = go(tmp_path, plan(f"SnapKVPress_{press}"))
    assert (row.n, row.failures) == (9, failures)
    failed = [r for r in read_samples(tmp_path) if r.failure]
    assert len(failed) == failures
    assert all(match in r.failure and r.score == 0 for r in failed)


def test_a_peer_that_dies_on_all_prompts_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="5 prompts in a row"):
        go(tmp_path, plan("always_dies"))


def test_a_run_goes_on_where_it_was_left(tmp_path: Path) -> None:
    def stop(cell: Any, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "parts", plan(), progress=stop)
    assert 0 < len(read_samples(tmp_path / "parts")) < 18
    assert go(tmp_path / "parts", plan()) == go(tmp_path / "whole", plan())
    assert len(read_samples(tmp_path / "parts")) == 18


def test_a_prompt_that_does_not_fit_is_a_failure_and_not_exported(tmp_path: Path, monkeypatch: Any) -> None:
    short = SimpleNamespace(of=lambda model: SimpleNamespace(position_limit=36))
    monkeypatch.setattr("millpond_lab.evals.peers.run.ModelProfile", short)
    (row,) = go(tmp_path, plan("full", budgets=None))
    reasons = [r.failure for r in read_samples(tmp_path)]
    assert row.failures == 5
    assert sum("longer than the model's 36 positions" in reason for reason in reasons) == 4
    assert sum("did not end within the model's 36 positions" in reason for reason in reasons) == 1
    assert export(plan("full", budgets=None), tiny_model(), tiny_tokenizer(), tmp_path / "x.jsonl") == 5


def test_what_is_exported_can_be_answered_elsewhere(tmp_path: Path) -> None:
    one = plan(protocols=["aware", "agnostic"])
    assert export(one, tiny_model(), tiny_tokenizer(), tmp_path / "ask.jsonl") == 2 * (9 + 3)
    requests = [json.loads(line) for line in (tmp_path / "ask.jsonl").read_text().splitlines()]
    with RestartingPeer(FAKE, []) as child:
        replies = [json.dumps(child.ask(request)) + "\n" for request in requests]
    (tmp_path / "said.jsonl").write_text("".join(replies))
    there = run_peer(one, ReplyFile(tmp_path / "said.jsonl"), tiny_model(), tiny_tokenizer(), tmp_path / "there")
    assert there == go(tmp_path / "here", one)
    (tmp_path / "said.jsonl").write_text("".join(replies[1:]))
    with pytest.raises(DataError, match="has no reply to"):
        run_peer(one, ReplyFile(tmp_path / "said.jsonl"), tiny_model(), tiny_tokenizer(), tmp_path / "part")


@pytest.mark.parametrize(("text", "match"), [("{}\n", "line 1"), ("", "of nobody"), (None, "cannot be read")])
def test_a_file_without_replies_is_a_data_error(tmp_path: Path, text: str | None, match: str) -> None:
    if text is not None:
        (tmp_path / "said.jsonl").write_text(text)
    with pytest.raises(DataError, match=match):
        ReplyFile(tmp_path / "said.jsonl")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"protocols": ["turns"]}, "not in 'turns'"),
        ({"protocols": ["blind"]}, "unknown protocol"),
        ({"tasks": parse_specs("tiny_ppl", "tasks")}, "scored by perplexity"),
        ({"budgets": ["lots"]}, "is not a budget"),
        ({"methods": "full"}, "full takes no budget"),
        ({"samples": 0}, "at least 1"),
    ],
)
def test_what_a_peer_cannot_be_asked(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(MillpondError, match=match):
        plan(**changes)


def test_presses_are_checked_before_anything_is_asked() -> None:
    with pytest.raises(OptionError, match="NothingPress: unknown press"):
        RestartingPeer(FAKE, ["SnapKVPress", "NothingPress"])
    with pytest.raises(PeerError, match="ended without a reply"):
        RestartingPeer([sys.executable, "-c", "pass"], [])
    with pytest.raises(PeerError, match="which is no reply"):
        RestartingPeer([sys.executable, "-c", "input(); print('hello')"], [])
    with pytest.raises(OptionError, match="cannot be run"):
        RestartingPeer(["./no/such/program"], [])


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval-peer", *arguments], env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--peer", "kvpres"], "did you mean 'kvpress'"),
        (["--python", "no/such/python"], "benchmarks/peers/kvpress_env.sh"),
        (["--export", "a", "--answers", "b"], "name one of them"),
        (["--protocol", "turns"], "not in 'turns'"),
    ],
)
def test_mistakes_of_the_command_are_one_sentence(arguments: list[str], match: str) -> None:
    result = call("--tasks", "tiny", *arguments)
    assert result.exit_code == 2
    assert match in " ".join(result.stderr.split())


@pytest.mark.skipif(not KVPRESS.exists(), reason="needs kvpress: run benchmarks/peers/kvpress_env.sh")
def test_kvpress_answers_as_we_do_with_the_full_cache(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    both = [
        "--model",
        folder,
        "--tasks",
        "tiny_long",
        "--samples",
        "2",
        "--protocol",
        "aware,agnostic",
        "--budget",
        "30%",
        "--out",
        str(tmp_path / "out"),
        "--dtype",
        "f32",
    ]
    assert CliRunner().invoke(app, ["eval", *both, "--method", "full,h2o", "--device", "cpu"]).exit_code == 0
    presses = (
        "full,SnapKVPress:window_size=16,ObservedAttentionPress,AdaKVPress(SnapKVPress):window_size=16,"
        "StreamingLLMPress,TOVAPress,RandomPress,KnormPress,ExpectedAttentionPress,KeyDiffPress,"
        "PyramidKVPress:window_size=16,CriticalKVPress(SnapKVPress):window_size=16,MergingPress(SnapKVPress):window_size=16"
    )
    result = call(*both, "--method", presses, "--python", str(KVPRESS), "--threads", "1")
    assert result.exit_code == 0, result.output + str(result.exception)
    rows = read_rows(tmp_path / "out")
    theirs = [row for row in rows if row.peer != "millpond"]
    assert len(theirs) == 13 * 2
    assert {row.failures for row in rows if not row.masks_only} == {0}
    hidden = [record.failure for record in read_samples(tmp_path / "out") if record.failure]
    assert all("Could not find fake keys" in failure for failure in hidden)  # how it masks has its limits
    answers: dict[str, list[tuple[str, int, str]]] = {}
    for record in read_samples(tmp_path / "out"):
        answers.setdefault(record.cell, []).append((record.sample, record.question, record.answer))
    for protocol in ("aware", "agnostic"):
        full = [answers[f"{folder}|full||auto|tiny_long|{protocol}|0|{who}"] for who in ("millpond", theirs[0].peer)]
        assert full[0] == full[1]
    h2o = {row.protocol: row for row in rows if row.method == "h2o"}
    for row in theirs:
        if row.method == "full" or row.masks_only:
            assert row.kv_bytes == row.full_kv_bytes
        else:
            off = 0.02 if "Pyramid" in row.method else 1e-6  # it rounds each layer by itself
            assert row.kept_share == pytest.approx(h2o[row.protocol].kept_share, rel=off)
            assert row.kv_bytes == pytest.approx(row.kept_share * row.full_kv_bytes, rel=0.01)
    assert [row.extra["pretended_share"] for row in theirs if row.masks_only] == pytest.approx([0.3, 0.3], abs=0.01)
    assert "masks only" in result.stdout
