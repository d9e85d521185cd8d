"""Chats with one fact each: drawn by a seed, with the fact once; the default states what the full cache states."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond_lab.evals.data.chat_facts import KINDS, FactChat, draw_chats
from tests.helpers.models import REAL, needs_real_model

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "quality"))

import chat_facts

DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Texts of numbered words."""
    (tmp_path / "text").mkdir()
    for place, name in enumerate(chat_facts.TEXTS):
        paragraphs = (" ".join(f"word{place}x{n}y{i}" for i in range(60)) for n in range(80))
        (tmp_path / name).write_text("\n\n".join(paragraphs), encoding="utf-8")
    return tmp_path


def drawn(data: Path, seed: int = chat_facts.SEED) -> list[FactChat]:
    """The benchmark's chats over the texts of a folder."""
    return draw_chats([data / name for name in chat_facts.TEXTS], chat_facts.CHATS, seed)


def test_chats_are_the_same_for_a_seed(data: Path) -> None:
    assert drawn(data) == drawn(data)
    assert drawn(data) != drawn(data, seed=8)


def test_each_fact_is_there_once_and_the_question_does_not_say_it(data: Path) -> None:
    chats = drawn(data)
    assert len(chats) == 20
    assert {chat.kind for chat in chats} == set(KINDS)
    assert {len(chat.messages) for chat in chats} == {2, 6}
    for chat in chats:
        text = "\n".join(message["content"] for message in chat.messages)
        assert text.count(chat.states) == 1
        assert chat.states not in chat.messages[-1]["content"].split("\n\n")[-1]
        assert chat.is_stated_by(f"It is {chat.states.upper()}.")
        assert not chat.is_stated_by("I do not know.")
    words = [sum(len(message["content"].split()) for message in chat.messages) for chat in chats]
    assert words == sorted(words)


def test_facts_are_counted_where_the_full_cache_states_them() -> None:
    def row(stated: bool) -> dict[str, Any]:
        return {"stated": stated, "bytes": 0.5}

    found = chat_facts.counted([row(True), row(False), row(True)], [row(True), row(True), row(False)])
    assert found == {"stated": 1, "of": 2, "bytes": 0.5}


@needs_real_model
@pytest.mark.skipif(not DATA.is_dir(), reason="the texts are not in ../shared/data")
def test_the_default_states_what_the_full_cache_states() -> None:
    assert REAL is not None
    model, tokenizer = mp.load_model(REAL), mp.load_tokenizer(REAL)
    chats = drawn(DATA)
    full, default = (
        chat_facts.answered(model, tokenizer, chats, chat_facts.SETTINGS[name]) for name in ("full", "default")
    )
    counted = chat_facts.counted(default, full)
    assert counted["of"] >= 8, "a model that states this few facts shows nothing"
    assert counted["stated"] == counted["of"]
    assert counted["bytes"] < 0.65
