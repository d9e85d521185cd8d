"""Calls into the engine's thread: clients take turns, and one client's calls keep their order."""

from __future__ import annotations

from millpond.engine.async_llm import CallQueue


def test_two_hundred_calls_of_one_client_hold_up_no_other() -> None:
    queue, done = CallQueue(), []
    for number in range(200):
        queue.put(lambda number=number: done.append(f"many {number}"), "many")  # type: ignore[misc]
    queue.put(lambda: done.append("one"), "one")
    while queue:
        queue.take()()
    assert done[:3] == ["many 0", "one", "many 1"]
    assert [call for call in done if call != "one"] == [f"many {number}" for number in range(200)]
