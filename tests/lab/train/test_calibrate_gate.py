"""Calibration of trained gates: what texts keep, what stays as it was, refusals, sparse texts, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import millpond as mp
from millpond.errors import DataError, OptionError
from millpond.hf.retaining_heads import gates_of_package
from millpond.models.load import load_model
from millpond.policy.trained.file import gates_of
from millpond.policy.trained.networks import SINKS, WINDOW, Gates, LayerGate
from millpond_lab.bench.methods.candidate import random_gates
from millpond_lab.pond.facts import TASKS, draw_paper
from millpond_lab.pond.words import EOS_ID, FILLER, VOCABULARY
from millpond_lab.train.gate.card import CalibratedGates, calibrate_gates, calibration_section
from millpond_lab.train.gate.shares import GateJudge, share_of
from millpond_lab.train.gate.train import CHECK_STREAM, TRAIN_STREAM
from millpond_lab.train.recall.rows import SOURCES
from millpond_lab.train.retain.features import TextReader
from millpond_lab.train.retain.texts import (
    FACT_WORDS,
    LENGTH,
    QUESTIONS,
    Asked,
    MixedRecallTexts,
    RecallTexts,
    SparseRecallTexts,
)
from tests.cli.test_cli import right, wrong
from tests.helpers.matrix.models import llama
from tests.lab.train.test_retain import Random


def calibrate(out: Path, target: float, window: int = 3, acts: str = "end") -> tuple[Gates, CalibratedGates]:
    model = llama(dtype=torch.float32)
    found = random_gates(model)
    gates = Gates(found.layers, found.model, found.name, {"acts": acts})
    return gates, calibrate_gates(model, gates, Random(), out, target=target, n_texts=6, sinks=2, window=window)


@pytest.mark.parametrize("target", [0.25, 0.8])
def test_held_out_texts_keep_the_target_and_only_biases_move(target: float, tmp_path: Path) -> None:
    out = tmp_path / "gate.safetensors"
    gates, result = calibrate(out, target)
    assert abs(sum(result.before) / 6 - target) > 0.1
    assert sum(result.after) / 6 == pytest.approx(target, abs=0.05)
    written = gates_of(out.read_bytes(), "it")
    assert written.digest != gates.digest
    for old, new in zip(gates.layers, written.layers, strict=True):
        for part in LayerGate.PARTS:
            before = getattr(old, part)
            moved = before + result.shift if part == "b2" else before.bfloat16()
            assert torch.equal(getattr(new, part).float(), moved.float())
    assert written.facts == {
        "acts": "end",
        "target": f"{target:g}",
        "calibrated": "random tokens",
        "shift": f"{result.shift:.6g}",
    }
    section = calibration_section(result, 12_345)
    assert f"{result.shift:+.3f} was added" in section
    assert "12,345 bytes on disk" in section


@pytest.mark.parametrize("acts", ["prompt", "end"])
def test_the_cache_keeps_what_was_measured(acts: str, tmp_path: Path) -> None:
    """Of the same texts, through the method itself."""
    out = tmp_path / "gate.safetensors"
    _, result = calibrate(out, 0.3, acts=acts)
    model, shares = llama(dtype=torch.float32), []
    for step in range(6):
        asked = Random().draw("gate-share-check", 0, step)
        with (
            torch.no_grad(),
            mp.compress(model, "attention_gate", gate=str(out), sinks=2, window=3, acts=acts) as cache,
        ):
            model(asked.ids[None, : asked.begin], cache=cache)
            held = [len(head) for layer in range(len(cache.layers)) for head in cache.positions(layer)]
        shares.append(sum(held) / len(held) / asked.begin)
    assert shares == pytest.approx(result.after, abs=0.011)  # two entries of 192


def test_a_target_below_the_entries_that_stay_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "gate.safetensors"
    with pytest.raises(DataError, match=r"keep 45\.8% at the nearest, not 10%: the first 2 and the newest 20"):
        calibrate(out, 0.1, window=20)
    with pytest.raises(OptionError, match="target=1 is a share"):
        calibrate(out, 1)
    assert not out.exists()


def test_sparse_texts_are_long_with_few_facts_of_every_kind() -> None:
    texts, n = SparseRecallTexts(), len(SOURCES) * len(FACT_WORDS)
    filler = {VOCABULARY.index(word) for word in FILLER}
    for step in range(n):
        asked = texts.draw("any", 0, step)
        assert torch.equal(texts.draw("any", 0, step).ids, asked.ids)
        assert asked.begin == LENGTH + 1 < len(asked.ids)
        told = sum(int(word) not in filler for word in asked.ids[1 : asked.begin])
        assert 1 <= told <= 110
    names = {TRAIN_STREAM, CHECK_STREAM, "gate-share", "gate-share-check"}
    assert len({tuple(texts.draw(name, 0, 0).ids.tolist()) for name in names}) == 4
    assert "eval" not in names


def test_mixed_texts_are_rows_of_training_and_sparse_ones_by_turns() -> None:
    texts, rows, sparse = MixedRecallTexts(), RecallTexts(), SparseRecallTexts(QUESTIONS)
    for step in range(8):
        source = sparse if step % 2 else rows
        assert torch.equal(texts.draw("retain", 5, step).ids, source.draw("retain", 5, step // 2).ids)
    asked = [texts.draw("retain", 5, step) for step in range(1, 57, 2)]
    counts = [int((text.ids[text.begin :] == EOS_ID).sum()) for text in asked]
    assert min(counts) >= 1
    assert 4 < max(counts) <= QUESTIONS


@pytest.mark.slow
@torch.no_grad()
def test_the_gate_of_the_package_keeps_a_tenth_of_every_task() -> None:
    """Within two points of the target by task; texts of 1,024 words of another seed than the tables'."""
    model = load_model("pond-recall")
    judge = GateJudge(TextReader(model), "prompt", SINKS, WINDOW)
    gates = [gate.to(model.device) for gate in gates_of_package(model).layers]
    for task in TASKS:
        texts = [torch.from_numpy(draw_paper(task, 71, index, 1024, {}).text) for index in range(6)]
        asked = [Asked(torch.cat([text, text[:1]]), len(text)) for text in texts]
        shares = [share_of(judge.judge(gates, text).logits, SINKS, WINDOW) for text in asked]
        assert sum(shares) / len(shares) == pytest.approx(0.1, abs=0.02), task


@pytest.mark.slow
def test_the_command_calibrates_and_adds_to_the_card(tmp_path: Path) -> None:
    out, card = tmp_path / "gate.safetensors", tmp_path / "gate.md"
    card.write_text("# Gates\n")
    said = right(
        "train",
        "calibrate-gate",
        "--data",
        "recall:sparse",
        "--texts",
        "2",
        "--target-keep",
        "20%",
        "--out",
        str(out),
        "--card",
        str(card),
    ).stdout
    assert "on 2 held-out texts" in said
    assert gates_of(out.read_bytes(), "it").facts["target"] == "0.2"
    assert "sparse rows of pond-recall's families keep 20%" in card.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "a.bin", "--data", "recall"], "name a file that ends in .safetensors"),
        (["--out", "a.safetensors", "--data", "recall", "--target-keep", "0"], "between 0 and 1, such as"),
        (["--out", "a.safetensors", "--data", "recall", "--card", "no.md"], "--card no.md: there is no such file"),
        (["--out", "a.safetensors", "--data", "recall", "--gate", "no.safetensors"], "no.safetensors"),
    ],
)
def test_commands_that_make_no_sense(arguments: list[str], message: str) -> None:
    assert message in wrong("train", "calibrate-gate", *arguments)
