"""Bytes of requests between two workers: never above a limit, and no longer than they are wanted."""

from __future__ import annotations

import pytest

from millpond.cluster.worker import HandoffBuffer, HandoffGoneError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_no_more_than_the_limit_is_held_or_reserved() -> None:
    buffer = HandoffBuffer(100, 10)
    assert buffer.reserve("a", 60)
    assert not buffer.reserve("a", 1), "it is being packed already"
    assert not buffer.reserve("b", 41), "two that are packed at a time count together"
    assert buffer.reserve("b", 40)
    assert buffer.size == 100
    assert buffer.put("a", b"x" * 50)
    assert not buffer.put("b", b"y" * 51), "it is larger than it was thought to be"
    assert (buffer.size, "b" in buffer) == (50, False)
    assert buffer.fetch("a") == buffer.fetch("a") == b"x" * 50
    buffer.drop("a")
    buffer.drop("a")
    assert buffer.size == 0
    with pytest.raises(HandoffGoneError, match="begin it again"):
        buffer.fetch("a")


def test_what_is_not_wanted_any_more_is_freed_after_its_lease() -> None:
    clock = Clock()
    buffer = HandoffBuffer(100, 10, clock)
    for name in "ab":
        assert buffer.reserve(name, 50)
        assert buffer.put(name, b"x" * 50)
    clock.now = 9
    assert buffer.drop_lapsed() == []
    buffer.keep({"a", "unknown"})
    clock.now = 10
    assert buffer.reserve("c", 50), "b has made room"
    assert "b" not in buffer
    clock.now = 18.9
    assert buffer.drop_lapsed() == []
    clock.now = 19
    assert buffer.drop_lapsed() == ["a"]
    assert buffer.size == 50, "c is being packed and has no lease yet"
    buffer.clear()
    assert buffer.size == 0
