"""Training of retaining heads: labels, gradient, texts, resume, errors, and the heads that come with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.errors import DataError, NumericsError, OptionError
from millpond.hf.calibration.load import model_mark
from millpond.kernels.args import AttentionShape
from millpond.models.load import load_model
from millpond.policy.trained.file import heads_of
from millpond_lab.train.retain import texts as sources
from millpond_lab.train.retain import train as training
from millpond_lab.train.retain.features import LEAST_LOG_PROB, LayerText, TextReader, labels_of
from millpond_lab.train.retain.texts import Asked, FileTexts, RecallTexts
from millpond_lab.train.retain.train import (
    RetainSettings,
    TrainedHeads,
    TrainedResult,
    overlap,
    retaining_loss,
    train_retain,
    write_card,
)
from tests.cli.test_cli import right
from tests.helpers.matrix.models import llama

TINY = RetainSettings(steps=12, width=8, lr=1e-2, check_texts=3, checkpoint_steps=4)


class Random:
    """Texts of random tokens."""

    name = "random tokens"

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        names = [sum(stream_name.encode()), seed, step]
        draw = torch.Generator().manual_seed(sum(n * 1000**i for i, n in enumerate(names)))
        return Asked(torch.randint(2, 96, (60,), generator=draw), 48)


def qkv(n: int = 70, heads: int = 4, kv: int = 2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(heads, n, 8, generator=draw) * 2, torch.randn(kv, n, 8, generator=draw)


# ---------------------------------------------------------------------- labels


SHAPES = {
    "plain": AttentionShape(0.35),
    "softcap": AttentionShape(0.35, softcap=3.0),
    "window": AttentionShape(0.35, window=25),
    "sinks": AttentionShape(0.35, sink_logits=torch.tensor([0.5, 1.0, 2.0, -1.0])),
}


def plain_label(q: Tensor, k: Tensor, shape: AttentionShape, j: int, head: int, first: int) -> float:
    """max over later queries and query heads of log softmax, one query at a time."""
    best = LEAST_LOG_PROB
    for h in (2 * head, 2 * head + 1):
        for i in range(first, q.shape[1]):
            seen = [t for t in range(i + 1) if not shape.window or i - t < shape.window]
            if j not in seen:
                continue
            logits = torch.stack([q[h, i] @ k[head, t] for t in seen]) * shape.scale
            if shape.softcap:
                logits = shape.softcap * (logits / shape.softcap).tanh()
            total = logits if shape.sink_logits is None else torch.cat([logits, shape.sink_logits[h : h + 1]])
            best = max(best, float(logits[seen.index(j)] - total.logsumexp(0)))
    return best


@pytest.mark.parametrize("name", SHAPES)
def test_labels_against_a_plain_computation(name: str) -> None:
    (q, k), shape = qkv(40), SHAPES[name]
    found = labels_of(q[:, 30:], k, shape)
    assert found.shape == (2, 30)
    for head, j in ((0, 0), (1, 7), (0, 21), (1, 29)):
        assert float(found[head, j]) == pytest.approx(plain_label(q, k, shape, j, head, 30), abs=1e-5)


@pytest.mark.parametrize("label", ["log_prob", "logit"])
@pytest.mark.parametrize("name", SHAPES)
def test_labels_in_blocks_are_those_at_once(name: str, label: Any) -> None:
    q, k = qkv()
    at_once = labels_of(q[:, 20:], k, SHAPES[name], label, block=1000)
    for block in (1, 7, 50):
        assert (labels_of(q[:, 20:], k, SHAPES[name], label, block=block) - at_once).abs().max() <= 1e-6
    assert torch.isfinite(at_once).all()


def test_an_unknown_label_is_refused() -> None:
    q, k = qkv(10)
    with pytest.raises(OptionError, match="must be log_prob or logit"):
        labels_of(q[:, 5:], k, SHAPES["plain"], "rank")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- the loss and its gradient


def test_the_gradient_against_finite_differences() -> None:
    torch.manual_seed(0)
    heads = [TrainedHeads(5, 4, 2).double() for _ in range(2)]
    x = [torch.randn(9, 5, dtype=torch.float64) for _ in heads]
    y = [torch.randn(2, 9, dtype=torch.float64) * 2 for _ in heads]

    def loss() -> Tensor:
        return retaining_loss([head(a) for head, a in zip(heads, x, strict=True)], y)

    loss().backward()  # type: ignore[no-untyped-call]
    for head in heads:
        for parameter in head.parameters():
            assert parameter.grad is not None
            for place in range(parameter.numel()):
                flat, step = parameter.data.view(-1), 1e-6
                before = float(flat[place])
                values = []
                for move in (step, -step):
                    flat[place] = before + move
                    values.append(float(loss().detach()))
                flat[place] = before
                slope = (values[0] - values[1]) / (2 * step)
                assert float(parameter.grad.view(-1)[place]) == pytest.approx(slope, abs=1e-7)


def test_overlap_by_hand() -> None:
    labels = torch.tensor([[9.0, 8, 1, 2, 3, 4, 5, 0, 0, 0], [0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    scores = torch.tensor([[1.0, 0, 9, 0, 0, 0, 0, 0, 0, 0], [0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    assert overlap(scores, labels, 0.2).tolist() == [0.5, 1.0]


# ---------------------------------------------------------------------- features


@pytest.mark.parametrize("chunked", [False, True])
def test_features_are_what_the_cache_scores(chunked: bool) -> None:
    """Heads that see the features of training give the scores that lie with the entries."""
    model, text = llama(dtype=torch.float32), Random().draw("any", 0, 0)
    heads = mp.compress(model, "locret", 48).policy.entry_scores
    assert heads is not None
    options: dict[str, Any] = {"prefill": "chunks", "chunk": 12} if chunked else {}
    budget = 20 if chunked else 48
    with torch.no_grad(), mp.compress(model, "locret", budget, **options) as cache:
        policy = cache.policy
        model(text.ids[None, : text.begin], cache=cache)
        held = [layer_cache.read(0) for layer_cache in cache.layer_caches]
    found = TextReader(model).read(text.ids, text.begin, policy if chunked else None, budget)
    for layer, (own, entries) in enumerate(zip(found, held, strict=True)):
        scored = heads.layers[layer].scores(own.features.float())
        kept = entries.positions.long()
        assert torch.allclose(entries.scores, scored.gather(1, kept), atol=2e-4)
        assert own.labels.shape == (2, 48)


# ---------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainedResult]:
    out = tmp_path_factory.mktemp("whole") / "heads.safetensors"
    return out, train_retain(llama(dtype=torch.float32), Random(), out, TINY, show_progress=False)


def test_interrupted_and_resumed_ends_with_the_same_file(whole: tuple[Path, TrainedResult], tmp_path: Path) -> None:
    out = tmp_path / "heads.safetensors"
    for stop in (3, 4, 9, None):
        result = train_retain(llama(dtype=torch.float32), Random(), out, TINY, max_steps=stop, show_progress=False)
        assert result.run.step == (stop or TINY.steps)
    assert out.read_bytes() == whole[0].read_bytes()
    again = train_retain(llama(dtype=torch.float32), Random(), out, TINY, show_progress=False)
    assert again.run.step == TINY.steps


def test_a_minute_limit_stops_and_writes_what_was_learned(tmp_path: Path) -> None:
    out = tmp_path / "heads.safetensors"
    result = train_retain(llama(dtype=torch.float32), Random(), out, TINY, max_minutes=0, show_progress=False)
    assert result.run.step == 1
    assert heads_of(out.read_bytes(), "it").facts["steps"] == "1"


def test_another_seed_model_or_setting_is_not_resumed(whole: tuple[Path, TrainedResult], tmp_path: Path) -> None:
    out = tmp_path / "heads.safetensors"
    model = llama(dtype=torch.float32)
    train_retain(model, Random(), out, TINY, max_steps=1, show_progress=False)
    with pytest.raises(OptionError, match="seed 0, not 1"):
        train_retain(model, Random(), out, RetainSettings(**{**vars_of(TINY), "seed": 1}), show_progress=False)
    with pytest.raises(OptionError, match="begun with another model"):
        train_retain(llama("mha", torch.float32), Random(), out, TINY, show_progress=False)


def vars_of(settings: RetainSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in RetainSettings.__dataclass_fields__}


def test_what_is_trained_is_used(whole: tuple[Path, TrainedResult]) -> None:
    out, result = whole
    model = llama(dtype=torch.float32)
    heads = heads_of(out.read_bytes(), "it")
    assert heads.model == model_mark(model) == result.heads.model
    assert heads.digest == result.heads.digest
    assert heads.facts["data"] == "random tokens"
    ids = Random().draw("any", 0, 1).ids[None]
    with torch.no_grad(), mp.compress(model, "locret", 20, heads=str(out)) as cache:
        model(ids, cache=cache)
        assert all(len(head) == 20 for head in cache.positions(1))
    for layer in heads.layers:  # quantiles are those of the texts: scores fill 0 to 1
        assert (layer.quantiles.diff() >= 0).all()


def test_training_lowers_the_loss_and_finds_more_of_the_best(tmp_path: Path) -> None:
    settings = RetainSettings(steps=80, width=32, lr=1e-2, check_texts=4)
    model = llama(dtype=torch.float32)
    first, last = (
        train_retain(model, Random(), tmp_path / f"{stop}.safetensors", settings, max_steps=stop, show_progress=False)
        for stop in (1, None)
    )
    assert sum(map(sum, last.overlaps)) > sum(map(sum, first.overlaps)) + 0.2
    assert min(line.loss for line in last.run.log[-2:]) < last.run.log[0].loss


def test_texts_with_eviction_are_read_from_a_quarter_of_the_steps_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read, budgets = TextReader.read, []

    def noted(self: TextReader, ids: Tensor, begin: int, policy: Any = None, budget: int = 0) -> list[LayerText]:
        budgets.append(budget)
        return read(self, ids, begin, policy, budget)

    monkeypatch.setattr(TextReader, "read", noted)
    settings = RetainSettings(**{**vars_of(TINY), "budget": 20, "chunk": 12})
    result = train_retain(
        llama(dtype=torch.float32), Random(), tmp_path / "h.safetensors", settings, show_progress=False
    )
    assert budgets == [0, 0, 0, 20, 0, 20, 0, 20, 0, 20, 0, 20, 0, 0, 0]
    assert "every other text with eviction to 20 entries" in write_card(
        result, tmp_path / "h.safetensors", name="tiny", hardware="a machine"
    )


def test_nan_stops_at_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "heads.safetensors"
    loss, calls = retaining_loss, []

    def broken(scores: list[Tensor], labels: list[Tensor]) -> Tensor:
        calls.append(1)
        return loss(scores, labels) * (float("nan") if len(calls) == 7 else 1)

    monkeypatch.setattr(training, "retaining_loss", broken)
    with pytest.raises(NumericsError, match=r"loss of step 6 is nan; .*checkpoint has the last good one"):
        train_retain(llama(dtype=torch.float32), Random(), out, TINY, show_progress=False)
    monkeypatch.undo()
    resumed = train_retain(llama(dtype=torch.float32), Random(), out, TINY, max_steps=5, show_progress=False)
    assert resumed.run.step == 5  # it stood at 4


# ---------------------------------------------------------------------- texts


def by_letter(text: str) -> list[int]:
    return [ord(c) % 96 for c in text]


def test_rows_of_recall_come_from_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from millpond_lab.pond import facts
    from millpond_lab.train.recall import rows

    names: list[tuple[object, ...]] = []
    stream = facts.stream

    def noted(*name: object) -> Any:
        names.append(name)
        return stream(*name)

    for module in (sources, rows):
        monkeypatch.setattr(module, "stream", noted)
    first = RecallTexts().draw("retain", 0, 5)
    assert torch.equal(RecallTexts().draw("retain", 0, 5).ids, first.ids)
    assert not torch.equal(RecallTexts().draw("retain-check", 0, 5).ids[:50], first.ids[:50])
    assert {name[1] for name in names} == {"retain", "train", "retain-check"}
    assert first.begin in (257, 513, 1025)
    assert len(first.ids) > first.begin


def test_no_task_of_the_evaluation_reads_a_stream_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from millpond_lab.pond import facts

    names: list[str] = []
    stream = facts.stream
    monkeypatch.setattr(facts, "stream", lambda *name: names.append(":".join(map(str, name))) or stream(*name))
    for family in facts.TASKS:
        facts.draw_paper(family, 0, 0, 256)
    assert names
    assert not [name for name in names if name.split(":")[1] in ("retain", "retain-check", "train", "warm-up")]


def test_a_family_can_be_left_out() -> None:
    from millpond_lab.pond import words as w

    texts = RecallTexts(["passages"])
    assert texts.name.endswith("without passages")
    for step in range(12):
        assert w.ID[w.COPY] not in texts.draw("retain", 0, step).ids.tolist()
    assert any(w.ID[w.COPY] in RecallTexts().draw("retain", 0, step).ids.tolist() for step in range(12))
    with pytest.raises(OptionError, match="did you mean 'pairs'"):
        RecallTexts(["pair"])


def test_cuts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("abcdefghij" * 100)
    texts = FileTexts(file, by_letter, 50, 80)
    for step in range(20):
        ids, begin = texts.draw("retain", 0, step)
        assert 50 <= len(ids) <= 80
        assert len(ids) - begin == len(ids) // 8
        assert "".join(chr(96 + (i - 97 % 96) % 96 + 1) for i in ids.tolist()) in "abcdefghij" * 100
    assert len({len(texts.draw("retain", 0, step).ids) for step in range(20)}) > 3


def test_questions_of_a_file_ask(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    lines = [
        {"context": "x" * 60, "question": "who?", "answer": "me"},
        {"messages": [{"role": "user", "content": "y" * 60}, {"role": "assistant", "content": "yes"}]},
        {"text": "too short"},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    texts = FileTexts(file, by_letter, 50, 64)
    ends = {bytes(ids[begin:].tolist()): begin for ids, begin in (texts.draw("retain", 0, s) for s in range(30))}
    assert set(ends) == {bytes(by_letter("\nwho? me")), bytes(by_letter("\nyes"))}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", " \n", "no text of 50 tokens"),
        ("a.txt", "short", "its longest has 5"),
        ("a.jsonl", "{}", "line 1 .* has no text"),
        ("a.jsonl", '{"text": "x"}\nno', "line 2 .* is no JSON"),
        ("a.jsonl", '{"messages": [{"content": 5}, {}]}', "has no text"),
    ],
)
def test_data_without_text_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        FileTexts(tmp_path / name, by_letter, 50, 80)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        FileTexts(tmp_path / "none.txt", by_letter)


# ---------------------------------------------------------------------- the command


def test_the_command_trains_and_writes_a_card(tmp_path: Path) -> None:
    out = tmp_path / "heads.safetensors"
    command = ["train", "retain", "--data", "recall", "--out", str(out), "--steps", "2", "--width", "8", "--card"]
    assert "step 2 of 2" in right(*command).stdout
    heads = heads_of(out.read_bytes(), "it")
    assert heads.facts["data"] == "rows of pond-recall's families"
    card = out.with_suffix(".md").read_text()
    assert "2 texts, one a step, seed 0" in card
    model = load_model("pond-recall", "f32")
    ids = torch.randint(20, 300, (1, 100))
    with mp.compress(model, "locret", 40, heads=str(out)) as cache:
        assert model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=2).shape[1] > 100
