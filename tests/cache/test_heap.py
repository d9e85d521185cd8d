"""When freed memory goes back to the system while prompts are read."""

from __future__ import annotations

import pytest

from millpond.tiers import free_memory


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that memory was given back, beginning with none read."""
    times: list[int] = []
    monkeypatch.setattr(free_memory, "give_back", lambda: times.append(len(times)))
    monkeypatch.setattr(free_memory, "_read", 0)
    return times


def test_each_layer_of_a_long_pass_gives_back(given: list[int]) -> None:
    for _ in range(3):
        free_memory.give_back_after(free_memory.LONG)
    assert len(given) == 3


def test_short_passes_give_back_once_for_many(given: list[int]) -> None:
    passes = 2 * free_memory.MANY // (free_memory.LONG // 2)
    for _ in range(passes):
        free_memory.give_back_after(free_memory.LONG // 2)
    assert len(given) == 2


def test_queries_that_are_not_in_host_memory_give_nothing_back(given: list[int]) -> None:
    for _ in range(10):
        free_memory.give_back_after(0)
    assert given == []
