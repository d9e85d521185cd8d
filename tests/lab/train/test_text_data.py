"""What `pond-text` reads: documents, tokens, windows, and the tasks in them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millpond.errors import DataError
from millpond_lab.pond.english_facts import FORMS, draw_facts
from millpond_lab.train.text.data import (
    HELD_OUT,
    TokenFile,
    clean,
    draw_batch,
    held_out_files,
    open_tokens,
    read_document,
    training_files,
)
from millpond_lab.train.text.mix import Mixer
from millpond_lab.train.text.recipe import Tasks
from millpond_lab.train.text.tokenizer import BOS_ID, EOS_ID, plain_ids
from tests.helpers.train.text_tiny import TINY, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def tokens(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return open_tokens(corpus, tmp_path_factory.mktemp("cache"), TINY.vocab_size)


def test_cleaning() -> None:
    assert clean("\ufeff\r\n\r\na \r\nb\r\r\r\r\tc\n\n") == "a\nb\n\n\tc\n\n"


def test_held_out_documents_are_not_trained_on(corpus: Path, tokens: TokenFile) -> None:
    assert [file.name for file in training_files(corpus)] == ["novel.txt", "plain.txt"]
    assert [file.name for file in held_out_files(corpus)] == ["great_expectations.txt"]
    assert not set(tokens.documents) & set(HELD_OUT)


def test_the_token_file_is_the_documents(corpus: Path, tokens: TokenFile) -> None:
    assert tokens.ids.dtype == np.uint16
    (end, last) = np.flatnonzero(tokens.ids == EOS_ID)
    assert last == len(tokens) - 1
    assert tokens.documents == {"novel.txt": end + 1, "plain.txt": last - end}
    assert tokens.tokenizer.decode(tokens.ids[:end].tolist()) == read_document(corpus / "gutenberg" / "novel.txt")
    assert tokens.tokenizer.decode(tokens.ids[end + 1 : last].tolist()) == read_document(corpus / "plain.txt")


def test_figures_stand_alone(tokens: TokenFile) -> None:
    assert [tokens.tokenizer.decode([i]) for i in plain_ids(tokens.tokenizer, "4711")] == ["4", "7", "1", "1"]


def test_the_cache_is_not_taken_for_other_documents(corpus: Path, tmp_path: Path) -> None:
    open_tokens(corpus, tmp_path, TINY.vocab_size)
    with pytest.raises(DataError, match="another vocabulary"):
        open_tokens(corpus, tmp_path, TINY.vocab_size + 1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").write_text("something else")
    with pytest.raises(DataError, match="other documents"):
        open_tokens(tmp_path / "other", tmp_path, TINY.vocab_size)


def test_missing_or_broken_documents(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text to train on"):
        training_files(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DataError, match="UTF-8"):
        read_document(tmp_path / "bad.txt")


def test_the_walk_covers_the_text_evenly(tokens: TokenFile) -> None:
    length = 64
    count = len(tokens) // length
    seen = np.zeros(len(tokens), dtype=int)
    places = TokenFile(np.arange(len(tokens), dtype=np.uint16), {}, tokens.tokenizer)
    for ordinal in range(count):
        seen[places.at(ordinal, length, seed=3)] += 1
    assert seen.max() <= 2
    assert (seen > 0).mean() > 0.75  # independent draws would reach 1 - 1 / e = 0.63


@pytest.mark.parametrize("form", range(FORMS))
def test_facts_are_told_once_and_asked_once_later(tokens: TokenFile, form: int) -> None:
    facts = draw_facts(random.Random(form), 8, form)
    assert len({fact.told for fact in facts}) == len({fact.answer for fact in facts}) == 8
    for fact in facts:
        assert fact.answer.strip(" .") in fact.told
        assert fact.answer.strip(" .") not in fact.question
        assert fact.is_number == fact.answer.strip(" .").isdigit()


def test_windows_with_facts(tokens: TokenFile) -> None:
    mixer = Mixer(tokens.tokenizer)
    for draw in range(20):
        window = mixer.mix(random.Random(draw), tokens.at(draw, 2000, seed=0), Tasks(1.0, 0.0, 0.0))
        assert len(window) == 2000
        text = tokens.tokenizer.decode(window.tolist())
        rng = random.Random(draw)
        rng.random()  # which task
        facts = draw_facts(rng, rng.randint(2, 16))
        for fact in facts:
            asked = text.index(fact.question + fact.answer)
            assert text.index(fact.told) < asked


def mixed(tokens: TokenFile, tasks: Tasks) -> Iterator[tuple[Any, Any]]:
    """Twenty windows before and after they were mixed."""
    mixer = Mixer(tokens.tokenizer)
    for draw in range(20):
        plain = tokens.at(draw, 400, seed=0)
        window = mixer.mix(random.Random(draw), plain, tasks)
        assert len(window) == 400
        yield plain, window


def test_windows_with_copies(tokens: TokenFile) -> None:
    for plain, window in mixed(tokens, Tasks(0.0, 1.0, 0.0)):
        doubled = _repeats(window, 12)
        assert doubled > _repeats(plain, 12)


def test_drills_are_passages_that_come_again(tokens: TokenFile) -> None:
    for plain, window in mixed(tokens, Tasks(0.0, 0.0, 1.0)):
        assert set(window.tolist()) <= set(plain.tolist())
        assert _repeats(window, 6) > 60 > _repeats(plain, 6)


def _repeats(ids: np.ndarray, length: int) -> int:
    """Runs of `length` tokens that occurred before in the same window."""
    runs = [tuple(ids[i : i + length].tolist()) for i in range(len(ids) - length + 1)]
    return len(runs) - len(set(runs))


def test_without_tasks_a_window_is_the_text(tokens: TokenFile) -> None:
    plain = tokens.at(5, 300, seed=0)
    assert np.array_equal(Mixer(tokens.tokenizer).mix(random.Random(0), plain, Tasks(0.0, 0.0, 0.0)), plain)


def test_batches(tokens: TokenFile) -> None:
    mixer = Mixer(tokens.tokenizer)
    settings = {"first": 6, "windows": 5, "length": 200, "tasks": Tasks(0.3, 0.3, 0.3)}
    inputs, targets = draw_batch(tokens, mixer, seed=1, step=2, **settings)
    assert inputs.shape == targets.shape == (5, 200)
    assert (inputs[:, 0] == BOS_ID).all()
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    again = draw_batch(tokens, mixer, seed=1, step=2, **settings)
    assert (again[0] == inputs).all()
    assert (draw_batch(tokens, mixer, seed=2, step=2, **settings)[0] != inputs).any()
