"""Outputs while a prompt is read: how far it is, where a request asks for them."""

from __future__ import annotations

import pytest

from millpond.engine.engine import Engine
from tests.helpers.engine.helpers import add, alone, ask, engine_for

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LENGTH = 57


def steps_of(engine: Engine) -> dict[str, list[tuple[int, int, int]]]:
    """Of each request, what its outputs say: tokens read, tokens that were not computed, tokens of its answer."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    while engine.busy:
        for output in engine.step():
            (answer,) = output.completions
            found.setdefault(output.request_id, []).append((output.read, output.cached, len(answer.token_ids)))
    return found


@pytest.mark.parametrize("method", ["full", "h2o", "snapkv"])
def test_each_part_of_a_prompt_is_told_and_the_answer_is_the_same(method: str) -> None:
    engine = engine_for(method, prefix_cache=None)
    add(engine, ask(LENGTH, name="told", tell_read=True), ask(LENGTH, name="untold"))
    found, tokens = {}, []
    while engine.busy:
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output.read)
            if output.request_id == "told":
                tokens = list(output.completions[0].token_ids)
    engine.close()
    reads = found["told"]
    assert reads == sorted(reads)
    assert len([read for read in reads if read < LENGTH]) >= 3, "16 tokens a step, shared by two"
    assert set(found["untold"]) == {LENGTH}, "nobody asked"
    assert tokens == alone(method, LENGTH)


def test_what_another_prompt_has_read_is_told_as_cached() -> None:
    engine = engine_for("full", prefix_cache="lru")
    add(engine, ask(LENGTH, name="first", tell_read=True))
    first = steps_of(engine)["first"]
    add(engine, ask(LENGTH, name="second", tell_read=True))
    second = steps_of(engine)["second"]
    engine.close()
    assert {cached for _, cached, _ in first} == {0}
    (read, cached, _), *_ = second
    assert read == LENGTH
    assert cached >= LENGTH - 16


def test_a_request_that_ends_while_it_is_read_says_how_far_it_was() -> None:
    engine = engine_for("full")
    add(engine, ask(LENGTH, name="one", tell_read=True))
    (output,) = engine.step()
    assert (output.read, output.finished) == (16, False)
    engine.cancel("one")
    (output,) = engine.step()
    assert (output.read, output.completions[0].finish_reason) == (16, "cancelled")
    engine.close()
