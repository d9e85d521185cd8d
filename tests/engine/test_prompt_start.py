"""Beginnings of prompts: the sources are asked in order, and the first that has something is the only one."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.request_state import RequestState
from tests.helpers.engine.helpers import ask, engine_for, greedy, prompt


class _Source:
    """Has `n_tokens` of every prompt, and notes who asked."""

    def __init__(self, name: str, n_tokens: int, asked: list[str]) -> None:
        self.name, self.n_tokens, self.asked = name, n_tokens, asked

    def attach(self, state: RequestState) -> int:
        self.asked.append(self.name)
        return self.n_tokens


@pytest.mark.parametrize(
    ("has", "asked"), [((0, 0, 0), "abc"), ((0, 4, 8), "ab"), ((8, 4, 4), "a"), ((0, 0, 8), "abc")]
)
def test_the_first_source_that_has_something_of_a_prompt_is_the_last_one_asked(
    has: tuple[int, ...], asked: str
) -> None:
    engine = engine_for("full")
    names: list[str] = []
    start = engine._prompt_start
    start._sources = [_Source(name, n, names) for name, n in zip("abc", has, strict=True)]
    engine.add(ask(24))
    engine.add(ask(20, name="other"))
    step = engine._scheduler.plan()
    step.prefills = [(scheduled, n) for scheduled, n in step.prefills if scheduled.key == "24"]
    assert start.attach_prefixes(step) == []
    n_tokens = next((n for n in has if n), 0)
    assert "".join(names) == asked
    assert (
        engine._requests["24"].scheduled.num_computed_tokens == engine._requests["24"].completions[0].shared == n_tokens
    )
    assert engine._parts.counts["shared_tokens"] == n_tokens
    assert [n for _, n in step.prefills] == [16], "the step's tokens, now those behind what was attached"
    engine.abort_all()
    engine.close()


def _answer(engine: Engine, name: str, ids: list[int]) -> list[int]:
    engine.add(Request(request_id=name, prompt=ids, params=greedy(6)))
    (output,) = engine.drain()
    return list(output.outputs[0].token_ids)


def test_a_stored_turn_is_asked_before_the_prefix_cache(tmp_path: Path) -> None:
    engine = engine_for("full", cache_dir=tmp_path, prefix_cache=True)
    first = prompt(40)
    told = _answer(engine, "first", first)
    _answer(engine, "later", [*first, *told, *prompt(9)])
    stats = engine.stats()
    assert (stats.restored_tokens, stats.shared_tokens) == (45, 0), "the turn holds its answer, too"
    _answer(engine, "again", [*first, *prompt(7)])
    stats = engine.stats()
    assert (stats.restored_tokens, stats.shared_tokens) == (45, 40), "no stored turn goes with it"
    engine.close()
