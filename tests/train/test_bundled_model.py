"""The bundled weights, and the recipe that grew them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from millpond.errors import OptionError
from millpond.train.bundled import CHECKPOINT, supervised_logits, train_bundled
from millpond.train.bundled_eval import evaluate_recall
from millpond.train.bundled_model import BUNDLED_DIR, build_model
from millpond.train.curriculum import STAGES, Curriculum, draw_batch, is_copy_step
from millpond.train.recall_data import RecallShape, make_prompt, recall_batch, stream
from millpond.train.run import Recipe, Run

TINY = Recipe(tokens_per_step=256, warmup_steps=2, polish_steps=2, checkpoint_steps=1)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The work is small: on a busy machine several threads would mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(file.stat().st_size for file in BUNDLED_DIR.iterdir()) < 10_000_000


def test_bundled_model_recalls_with_the_full_cache(model: LlamaForCausalLM) -> None:
    assert evaluate_recall(model, pairs=32, body_len=512, contexts=4, seed=11) >= 0.97


def test_bundled_model_needs_its_context(model: LlamaForCausalLM) -> None:
    batch = recall_batch(RecallShape(16, 64), 4, stream("eval", 12))
    blind = torch.cat([batch.tokens[:, :1], batch.tokens[:, 65:]], dim=1)
    supervised = torch.cat([batch.supervised[:, :1], batch.supervised[:, 65:]], dim=1)
    with torch.inference_mode():
        logits = supervised_logits(model, blind, supervised)
    assert (logits.argmax(dim=-1) == batch.targets).float().mean() < 0.3


def test_bundled_model_answers_a_written_prompt(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = make_prompt(n_pairs=8, body_len=96, seed=13)
    texts = [f"{prompt.context} {question}" for question in prompt.questions]
    inputs = tokenizer(texts, return_tensors="pt")
    answers = model.generate(**inputs)[:, -1:]  # type: ignore[misc]
    words = tokenizer.batch_decode(answers)
    assert words == prompt.answers


def test_an_untrained_model_does_not_recall() -> None:
    assert evaluate_recall(build_model(0), pairs=8, body_len=64, contexts=4) < 0.2


def test_training_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole = train_bundled(tmp_path / "whole", seed=3, max_steps=4, recipe=TINY, show_progress=False)
    for steps in (1, 4):
        cut = train_bundled(tmp_path / "cut", seed=3, max_steps=steps, recipe=TINY, show_progress=False)
    other = train_bundled(tmp_path / "other", seed=4, max_steps=4, recipe=TINY, show_progress=False)
    assert _weights(whole).equal(_weights(cut))
    assert not _weights(whole).equal(_weights(other))
    assert (whole.curriculum, whole.step) == (cut.curriculum, 4)


def test_training_leaves_a_model_that_loads(tmp_path: Path) -> None:
    run = train_bundled(tmp_path, max_steps=1, recipe=TINY, device="cpu", show_progress=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.nn.utils.parameters_to_vector(loaded.parameters()).equal(_weights(run))
    assert {CHECKPOINT, "log.jsonl", "tokenizer.json"} <= {file.name for file in tmp_path.iterdir()}


def test_a_checkpoint_of_another_seed_is_refused(tmp_path: Path) -> None:
    train_bundled(tmp_path, seed=1, max_steps=1, recipe=TINY, show_progress=False)
    with pytest.raises(OptionError, match="begun with seed 1, not 2"):
        train_bundled(tmp_path, seed=2, max_steps=1, recipe=TINY, show_progress=False)


def test_logits_at_supervised_places_are_those_of_the_whole_model() -> None:
    model, batch = build_model(0), recall_batch(RecallShape(4, 16), 3, stream("train", 0))
    with torch.inference_mode():
        few = supervised_logits(model, batch.tokens, batch.supervised)
        all_logits = model(batch.tokens).logits
    torch.testing.assert_close(few, all_logits[batch.supervised])


def test_curriculum_opens_stages_by_running_recall_and_ends_in_the_polish() -> None:
    place = Curriculum()
    place.note(1.0)
    assert place.stage == 0
    assert place.recall == pytest.approx(0.1)
    for _ in range(31 * len(STAGES) - 1):  # 1 - 0.9**31 is the first above 0.96
        place.note(1.0)
    assert place.polishing
    assert place.recall == 0.0
    assert Curriculum(**json.loads(json.dumps(place.state()))) == place


def test_copy_warm_up_is_every_other_batch_of_the_first_stages() -> None:
    assert [is_copy_step(Curriculum(stage=1), step) for step in range(4)] == [False, True, False, True]
    assert not any(is_copy_step(Curriculum(stage=2), step) for step in range(4))


def test_every_stage_fits_its_tokens_and_positions() -> None:
    for stage, shape in enumerate(STAGES):
        tokens = draw_batch(Curriculum(stage=stage), seed=0, step=0, tokens=6144).tokens
        assert tokens.shape[1] == shape.row_len <= 4096
        assert tokens.numel() <= 6144


def _weights(run: Run) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()
