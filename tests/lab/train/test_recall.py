"""The bundled weights of pond-recall, and the recipe that grew them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from millpond.errors import OptionError
from millpond_lab.pond import words as w
from millpond_lab.pond.facts import FAMILIES, TASKS, draw_paper, spell
from millpond_lab.train.recall.card import evaluate_task, write_card
from millpond_lab.train.recall.model import BUNDLED_DIR, MAX_POSITIONS, build_model
from millpond_lab.train.recall.rows import (
    LENGTHS,
    NO_WORD,
    PATIENCE,
    POLISH,
    SOURCES,
    WARM_UP,
    Curriculum,
    draw_batch,
    warm_up_batch,
)
from millpond_lab.train.recall.train import (
    CHECKPOINT,
    RecallRun,
    Recipe,
    accepted_loss,
    supervised_logits,
    train_recall,
)

TINY = Recipe(tokens_per_step=256, warmup_steps=2, polish_steps=2, checkpoint_steps=1)
MARKS_OF_QUESTIONS = {w.ID[mark] for mark in (w.ASK, w.ALL, w.EACH, w.TRACE, w.COPY, w.MOST, w.COMMON)}
EVENLY = np.ones(len(SOURCES))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(BUNDLED_DIR)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(BUNDLED_DIR)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def test_bundled_folder_is_small_and_complete() -> None:
    names = {file.name for file in BUNDLED_DIR.iterdir()}
    assert names == {
        "MODEL_CARD.md",
        "chat_template.jinja",
        "config.json",
        "demo.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(file.stat().st_size for file in BUNDLED_DIR.iterdir()) < 5_000_000


@pytest.mark.parametrize("task", TASKS)
def test_bundled_model_answers_with_the_full_cache(model: LlamaForCausalLM, task: str) -> None:
    assert evaluate_task(model, task, length=768, papers=2, seed=11) >= 0.97


def test_bundled_model_needs_its_text(model: LlamaForCausalLM) -> None:
    paper = draw_paper("recall", 12, 0, 256, {"questions": 16})
    right = 0
    for asked in paper.asked:
        ids = torch.tensor([[w.BOS_ID, *asked.question, asked.answer[0]]])
        right += int(model(ids).logits[0, -1].argmax()) == asked.answer[1]
    assert right <= 3


def test_bundled_model_writes_an_answer_and_ends(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    paper = draw_paper("tracking", 13, 0, 256)
    text = spell(paper.text[1:]) + " " + spell(paper.asked[0].question)
    inputs = tokenizer(text, return_tensors="pt")
    out = model.generate(**inputs)[0, inputs["input_ids"].shape[1] :]  # type: ignore[misc]
    assert tokenizer.decode(out) == spell(paper.asked[0].answer)


def test_an_untrained_model_does_not_answer() -> None:
    assert evaluate_task(build_model(0), "recall", length=128, papers=2) < 0.3


@pytest.mark.slow
def test_training_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole = train_recall(tmp_path / "whole", seed=3, max_steps=2, recipe=TINY, show_progress=False)
    for steps in (1, 2):
        cut = train_recall(tmp_path / "cut", seed=3, max_steps=steps, recipe=TINY, show_progress=False)
    other = train_recall(tmp_path / "other", seed=4, max_steps=2, recipe=TINY, show_progress=False)
    assert _weights(whole).equal(_weights(cut))
    assert not _weights(whole).equal(_weights(other))
    assert (whole.curriculum, whole.step) == (cut.curriculum, 2)


def test_training_leaves_a_model_that_loads_and_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train_recall(tmp_path, max_steps=1, recipe=TINY, device="cpu", show_progress=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.nn.utils.parameters_to_vector(loaded.parameters()).equal(_weights(run).bfloat16().float())
    assert {CHECKPOINT, "log.jsonl", "tokenizer.json"} <= {file.name for file in tmp_path.iterdir()}
    monkeypatch.setattr("millpond_lab.train.recall.card.EXAM_LENGTHS", (160,))
    monkeypatch.setattr("millpond_lab.train.recall.card.ASKED", 1)
    monkeypatch.setattr("millpond_lab.train.recall.card.TASKS", ("recall",))
    card = write_card(run, tmp_path, hardware="a test", recipe=TINY)
    assert f"{run.model.num_parameters():,} parameters" in card
    assert "| recall | 0." in card


def test_a_checkpoint_of_another_seed_is_refused(tmp_path: Path) -> None:
    train_recall(tmp_path, seed=1, max_steps=1, recipe=TINY, show_progress=False)
    with pytest.raises(OptionError, match="begun with seed 1, not 2"):
        train_recall(tmp_path, seed=2, max_steps=1, recipe=TINY, show_progress=False)


@pytest.mark.parametrize("positions", [None, MAX_POSITIONS])
def test_logits_at_supervised_places_are_those_of_the_whole_model(positions: int | None) -> None:
    """The model reads a row that jumps as one sequence."""
    model = build_model(0)
    batch = draw_batch(0, 0, length=48, tokens=512, weights=EVENLY, positions=positions)
    assert (batch.positions.diff(dim=1) > 1).any() == (positions is not None)
    with torch.inference_mode():
        few = supervised_logits(model, batch)
        whole = model(batch.tokens, position_ids=batch.positions, cache=DynamicCache()).logits
    torch.testing.assert_close(few, whole[batch.supervised])


def test_positions_rise_within_the_limit_and_jump_between_filler() -> None:
    filler, jumps = set(w.ids(w.FILLER)), 0
    for step in range(20):
        batch = draw_batch(2, step, length=64, tokens=400, weights=EVENLY, positions=500)
        for row, places in zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True):
            end = row.index(w.PAD_ID) if w.PAD_ID in row else len(row)
            assert places[0] == 0
            assert max(places) < 500
            for i in range(1, end):
                assert places[i] > places[i - 1]
                jumps += places[i] > places[i - 1] + 1
                assert places[i] == places[i - 1] + 1 or {row[i], row[i - 1]} <= filler
    assert jumps > 20


def test_every_target_is_accepted_and_values_in_any_order() -> None:
    batch = draw_batch(0, 3, length=96, tokens=3000, weights=EVENLY)
    nexts, family = batch.tokens.roll(-1, 1)[batch.supervised], batch.family[batch.supervised]
    assert (batch.accepted == nexts[:, None]).any(1).all()
    several = (batch.accepted != NO_WORD).sum(1) > 1
    assert several.any()
    assert set(family[several].tolist()) == {FAMILIES.index("multivalue")}


def test_the_loss_is_that_of_all_accepted_words_together() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]).log()
    loss = accepted_loss(logits, torch.tensor([[1, 3], [2, NO_WORD]]))
    torch.testing.assert_close(loss, -(torch.tensor([0.6, 0.25]).log().mean()))


def test_only_answers_are_supervised() -> None:
    batch = draw_batch(0, 5, length=64, tokens=2000, weights=EVENLY)
    for row, supervised, family in zip(*map(rows_of, (batch.tokens, batch.supervised, batch.family)), strict=True):
        inside, question = False, 0
        for place, word in enumerate(row[:-1]):
            question = place if word in MARKS_OF_QUESTIONS else question
            inside = word == w.IS_ID or (inside and word != w.EOS_ID)
            assert supervised[place] == inside
            named = row[question : row.index(w.IS_ID, question)] if inside else []
            assert (family[place] >= 0) == (inside and row[place + 1] not in (w.EOS_ID, *named))
            assert family[place] < len(FAMILIES)


def test_warm_up_rows_repeat_themselves() -> None:
    batch = warm_up_batch(0, 1, tokens=500)
    for row, supervised in zip(batch.tokens.tolist(), batch.supervised.tolist(), strict=True):
        places = [place for place, is_target in enumerate(supervised) if is_target]
        length = len(places) + 1
        assert row[1 : 1 + length] == row[places[0] : places[0] + length]
    assert set(batch.family.unique().tolist()) == {WARM_UP, -1}


def test_batches_are_functions_of_seed_and_step() -> None:
    one, again, other = (draw_batch(0, step, length=64, tokens=500, weights=EVENLY) for step in (1, 1, 2))
    assert one.tokens.equal(again.tokens)
    assert one.tokens.shape != other.tokens.shape or not one.tokens.equal(other.tokens)


@pytest.mark.parametrize("length", sorted({*LENGTHS, *POLISH}))
def test_every_stage_fits_the_positions(length: int) -> None:
    for step in range(4):
        batch = draw_batch(1, step, length=length, tokens=4096, weights=EVENLY)
        assert batch.tokens.shape[1] <= MAX_POSITIONS
        assert batch.supervised.any(1).all()


def test_the_curriculum_goes_on_when_all_is_known_and_when_patience_ends() -> None:
    known, place = dict.fromkeys(range(len(FAMILIES)), 1.0), Curriculum()
    place.note(known)
    assert place.stage == 0
    for _ in range(40 * len(LENGTHS)):
        place.note(known)
    assert place.polishing
    assert Curriculum(**json.loads(json.dumps(place.state()))) == place
    for stage, end in ((0, 0), (2, 3)):
        slow = Curriculum(stage=stage)
        for _ in range(PATIENCE):
            slow.note({0: 0.0})
        assert slow.stage == end


def test_what_is_known_least_is_drawn_most() -> None:
    place = Curriculum(accuracy=[1.0] * len(FAMILIES))
    place.accuracy[FAMILIES.index("copy")] = 0.0
    weights = dict(zip(SOURCES, place._weights(), strict=True))
    assert max(weights, key=weights.__getitem__) == "passages"
    assert min(weights.values()) > 0


def test_the_warm_up_is_every_other_step_of_the_first_stages() -> None:
    assert [Curriculum(stage=1).is_warm_up(step) for step in range(4)] == [False, True, False, True]
    assert not any(Curriculum(stage=2).is_warm_up(step) for step in range(4))


def rows_of(tensor: torch.Tensor) -> list[list[int]]:
    return tensor.tolist()


def _weights(run: RecallRun) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()
