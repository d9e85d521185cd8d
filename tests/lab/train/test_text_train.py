"""The recipe of `pond-text` on a tiny corpus: schedule, resuming, what is saved, what the card says."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForCausalLM, AutoTokenizer

from millpond.errors import DataError, OptionError
from millpond_lab.train.text import card as text_card
from millpond_lab.train.text.data import TokenFile
from millpond_lab.train.text.eval import loss_by_place, perplexity, recall, told_again
from millpond_lab.train.text.recipe import PRESETS, build_text_model, recipe_named
from millpond_lab.train.text.train import CHECKPOINT, LOG, TextRun, train_text
from tests.helpers.train.text_tiny import TINY, write_corpus

QUIET = {"threads": 1, "device": "cpu", "show_progress": False}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The work is small: on a busy machine several threads would mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def done(corpus: Path, folder: Path) -> tuple[TextRun, TokenFile]:
    """The whole tiny run in one go."""
    return train_text(folder, corpus, TINY, **QUIET)


def test_the_schedule() -> None:
    assert [TINY.length_at(share) for share in (0.0, 0.74, 0.75, 1.0)] == [64, 64, 128, 128]
    assert TINY.rate_at(0, 0.0) == 0.5
    assert TINY.rate_at(9, TINY.decay_from) == 1.0
    assert TINY.rate_at(9, (1 + TINY.decay_from) / 2) == pytest.approx(0.5)
    assert TINY.rate_at(9, 1.0) == 0.0
    assert [TINY.tasks_at(share).drills for share in (0.0, 0.6, 1.0)] == [0.3, 0.1, 0.1]
    assert TINY.first_mark == 0.4


@pytest.mark.parametrize(("name", "least", "most"), [("cpu", 5e6, 7e6), ("cpu-long", 5e6, 7e6), ("gpu", 20e6, 32e6)])
def test_presets_have_the_size_that_they_are_meant_to_have(name: str, least: float, most: float) -> None:
    with torch.device("meta"):
        model = build_text_model(recipe_named(name), PRESETS[name].vocab_size, seed=0)
    assert least <= model.num_parameters() <= most
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.max_position_embeddings >= 2048
    assert PRESETS[name].longest == model.config.max_position_embeddings


def test_an_unknown_preset() -> None:
    with pytest.raises(OptionError, match="did you mean 'cpu'"):
        recipe_named("cqu")


def test_the_run_reads_what_was_planned_and_learns(done: tuple[TextRun, TokenFile], folder: Path) -> None:
    run, _ = done
    assert run.finished
    assert run.planned <= run.tokens < run.planned + TINY.tokens_per_step
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, run.step]
    assert lines[0]["loss"] > lines[-1]["loss"]
    assert (lines[0]["length"], lines[-1]["length"]) == (64, 128)
    assert 0 < lines[-1]["rate"] < 0.2


def test_a_run_cut_off_twice_ends_with_the_same_weights(
    done: tuple[TextRun, TokenFile], corpus: Path, tmp_path: Path
) -> None:
    for steps in (4, 11, None):
        run, _ = train_text(tmp_path, corpus, TINY, max_steps=steps, **QUIET)
    straight = done[0].model.state_dict()
    assert all(torch.equal(value, straight[name]) for name, value in run.model.state_dict().items())
    assert (run.step, run.tokens, run.windows) == (done[0].step, done[0].tokens, done[0].windows)


def test_no_time_left_still_saves_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    run, _ = train_text(tmp_path, corpus, TINY, max_minutes=0.0, **QUIET)
    assert run.step == 10
    assert (tmp_path / CHECKPOINT).is_file()
    assert not (tmp_path / CHECKPOINT).with_suffix(".new").exists()


def test_the_plan_may_change_only_before_it_counts(corpus: Path, tmp_path: Path) -> None:
    train_text(tmp_path, corpus, TINY, max_steps=4, **QUIET)
    longer, _ = train_text(tmp_path, corpus, TINY, tokens=3200, max_steps=9, **QUIET)
    assert longer.planned == 3200
    with pytest.raises(OptionError, match="too many to plan 1,600 instead"):
        train_text(tmp_path, corpus, TINY, **QUIET)


def test_another_seed_or_recipe_needs_another_folder(done: object, corpus: Path, folder: Path) -> None:
    with pytest.raises(OptionError, match="seed 0, not 1"):
        train_text(folder, corpus, TINY, seed=1, **QUIET)
    with pytest.raises(OptionError, match="recipe tiny, not other"):
        train_text(folder, corpus, replace(TINY, name="other"), **QUIET)


def test_the_folder_loads_through_the_auto_classes(done: tuple[TextRun, TokenFile], folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert tokenizer.model_max_length == TINY.context
    inputs = tokenizer("the cat ran 12.", return_tensors="pt")
    assert inputs["input_ids"][0, 0] == tokenizer.bos_token_id == model.config.bos_token_id
    assert tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True) == "the cat ran 12."
    weights = done[0].model.state_dict()
    assert all(torch.equal(value, weights[name].bfloat16()) for name, value in model.state_dict().items())
    out = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert out.shape[1] == inputs["input_ids"].shape[1] + 3


def test_measuring(done: tuple[TextRun, TokenFile], corpus: Path) -> None:
    run, text = done
    held_out = corpus / "gutenberg" / "great_expectations.txt"
    found = perplexity(run.model, text.tokenizer, held_out, 64, windows=8)
    assert found.tokens == 8 * 64
    assert 1 < found.perplexity < text.tokenizer.get_vocab_size()
    parts = loss_by_place(run.model, text.tokenizer, held_out, 64, windows=8, parts=4)
    assert sum(parts) / 4 == pytest.approx(found.nats, rel=1e-5)
    asked = recall(run.model, text.tokenizer, held_out, 256, contexts=2, facts=2, seed=1)
    assert (asked.asked, asked.numbers) == (4, 0.0)  # sixteen hundred tokens teach nobody to remember a number


class _Copier(torch.nn.Module):
    """Knows nothing but that every token is the one that came `shift` tokens before."""

    device = torch.device("cpu")

    def __init__(self, size: int, shift: int) -> None:
        super().__init__()
        self.size, self.shift = size, shift

    def forward(self, ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        logits = torch.zeros(*ids.shape, self.size)
        known = ids[:, 1 : ids.shape[1] - self.shift + 1]
        logits[:, self.shift :].scatter_(2, known[..., None], 50.0)
        return SimpleNamespace(logits=logits)


def test_a_passage_told_again(done: tuple[TextRun, TokenFile], corpus: Path) -> None:
    tokenizer = done[1].tokenizer
    model = _Copier(tokenizer.get_vocab_size(), shift=16 + 20)
    held_out = corpus / "gutenberg" / "great_expectations.txt"
    once, twice = told_again(model, tokenizer, held_out, 20, windows=4, length=16)
    assert once == pytest.approx(math.log(tokenizer.get_vocab_size()), rel=1e-5)
    assert twice == pytest.approx(0.0, abs=1e-6)


def _few_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of a tiny model in a moment."""
    few = {"LENGTHS": (32, 64), "WINDOWS": 2, "RECALL_LENGTHS": (128,), "RECALL_CONTEXTS": 2, "RECALL_FACTS": 1}
    for name, value in (few | {"AGAIN_GAPS": (8,), "ATTENTION_LENGTH": 64}).items():
        monkeypatch.setattr(text_card, name, value)


def test_the_card_comes_from_the_run(
    done: tuple[TextRun, TokenFile], corpus: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, text = done
    _few_measurements(monkeypatch)
    card = text_card.write_card(run, text, folder, corpus, hardware="a machine of the tests")
    assert (folder / "MODEL_CARD.md").read_text(encoding="utf-8") == card
    assert f"A Llama of {run.model.num_parameters():,} parameters" in card
    assert f"{run.step:,} steps,\n{run.tokens:,} tokens" in card
    assert "on a machine of the tests" in card
    assert "| great_expectations.txt | 64 | 128 |" in card
    assert "novel, plain" in card
    assert f"| {run.step:,} | {run.tokens:,} |" in card


def test_a_second_term_starts_from_what_the_first_saved(
    done: tuple[TextRun, TokenFile], corpus: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    shutil.copytree(folder, first)
    (first / "MODEL_CARD.md").write_text("# pond-text\n\n## Data\nold\n\n## Training\nhow it was\n", encoding="utf-8")
    out = tmp_path / "second"
    begun, _ = train_text(out, corpus, TINY, seed=1, start=first, max_steps=0, **QUIET)
    saved = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in begun.model.state_dict().items())
    assert begun.history == "how it was\n"
    run, text = train_text(out, corpus, TINY, seed=1, **QUIET)  # goes on from its own checkpoint
    assert (run.finished, run.history) == (True, begun.history)
    assert train_text(out, corpus, TINY, seed=1, start=first, **QUIET)[0].finished
    with pytest.raises(OptionError, match="begun with other weights than those of --start"):
        train_text(out, corpus, TINY, seed=1, start=out, **QUIET)
    _few_measurements(monkeypatch)
    card = text_card.write_card(run, text, out, corpus, hardware="a machine of the tests")
    assert "### First term\nhow it was\n\n### Second term, from there\n`millpond train text" in card
    assert "--start FIRST_TERM`" in card
    assert "# pond-tiny" in card
    assert "trained in two terms" in card


def test_what_cannot_be_started_from(corpus: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no pond-text to start from"):
        train_text(tmp_path / "a", corpus, TINY, start=tmp_path / "nothing", **QUIET)
    with pytest.raises(DataError, match=r"its shape is .*'num_attention_heads': 2.*, that of the recipe .*: 4"):
        train_text(tmp_path / "b", corpus, replace(TINY, heads=4), start=folder, **QUIET)
    with pytest.raises(DataError, match=r"'intermediate_size': 32.*, that of the recipe .*'intermediate_size': 48"):
        train_text(tmp_path / "c", corpus, replace(TINY, ffn=48), start=folder, **QUIET)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    a, b = list(words)[-2:]
    words[a], words[b] = words[b], words[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(DataError, match="another vocabulary"):
        train_text(tmp_path / "d", corpus, TINY, start=other, **QUIET)


@pytest.mark.parametrize(("precision", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_passes_multiply_in_the_precision_that_was_asked_for(
    corpus: Path, tmp_path: Path, precision: str, expected: torch.dtype
) -> None:
    made: set[torch.dtype] = set()

    def note(module: torch.nn.Module, args: object, out: object) -> None:
        if isinstance(module, torch.nn.Linear) and isinstance(out, torch.Tensor) and module.training:
            made.add(out.dtype)

    hook = register_module_forward_hook(note)
    try:
        run, _ = train_text(tmp_path, corpus, TINY, precision=precision, max_steps=1, **QUIET)
    finally:
        hook.remove()
    assert made == {expected}
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_a_run_keeps_its_precision(done: tuple[TextRun, TokenFile], corpus: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="precision bf16, not fp32"):
        train_text(folder, corpus, TINY, precision="fp32", **QUIET)
    with pytest.raises(OptionError, match="precision"):
        train_text(tmp_path, corpus, TINY, precision="fp16", **QUIET)
