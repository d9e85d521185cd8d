"""Decoding steps that are recorded when an engine opens: first requests replay them, and nothing else changes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from millpond.engine import record_steps
from millpond.engine.engine import Engine
from millpond.kernels.pages import Arenas
from millpond.models.lean.decode_graph import DecodeGraph
from tests.engine import test_codecs
from tests.engine.test_decode_graph import answers, graphs, launching
from tests.helpers.engine.helpers import engine_for, finish, tokens

__all__ = ["graphs"]  # a fixture


@pytest.fixture
def at_start(graphs: list[DecodeGraph], monkeypatch: pytest.MonkeyPatch) -> list[DecodeGraph]:
    """Engines record steps when they open, and pools keep the tensor of their addresses, as on a GPU."""
    real = Arenas._write_bases

    def kept(arenas: Arenas) -> None:
        before = arenas.bases
        if arenas.n_arenas or not before.shape[1]:
            real(arenas)
            if before.shape == arenas.bases.shape:
                arenas.bases = before.copy_(arenas.bases)

    monkeypatch.setattr(Arenas, "_write_bases", kept)
    monkeypatch.setattr(Engine, "_records_at_start", True)
    return graphs


def rows_of(graph: DecodeGraph) -> list[int]:
    return [one.inputs.n_seq for one in graph._graphs.values()]


def check_untouched(engine: Engine) -> None:
    """No page is held, and no figure has moved."""
    engine.check_integrity()
    figures = engine.stats()
    assert figures.kv_bytes == figures.kv_reserved == 0
    assert not any(engine._parts.counts.values())


@pytest.mark.parametrize("method", ["full", "h2o", "snapkv"])
def test_first_requests_replay(method: str, at_start: list[DecodeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(method, max_running=6)
    graph = at_start[-1]
    assert rows_of(graph) == [1, 2, 4, 8]  # of up to 6 sequences
    check_untouched(engine)
    before = graph.replayed
    found = answers(engine, 40, 57, 31, 29, 33)
    assert graph.recorded == 4
    assert graph.replayed - before == 11  # all steps: 12 tokens, the first by the prompt
    monkeypatch.setattr(Engine, "_records_at_start", False)
    assert answers(launching(engine_for(method, max_running=6)), 40, 57, 31, 29, 33) == found


@pytest.mark.parametrize("case", ["full int4", "h2o int4"])
def test_codes(case: str, at_start: list[DecodeGraph]) -> None:
    engine = test_codecs.engine_for(case, max_running=3)
    graph = at_start[-1]
    assert rows_of(graph) == [1, 2, 4]
    check_untouched(engine)
    for n in (210, 150):
        engine.add(test_codecs.ask(n))
    done = finish(engine)
    engine.close()
    assert graph.recorded == 3
    assert {n: tokens(done[str(n)]) for n in (210, 150)} == {n: test_codecs.alone(case, n) for n in (210, 150)}


def test_one_graph_where_each_batch_needs_its_own(at_start: list[DecodeGraph]) -> None:
    engine = test_codecs.engine_for("full think")
    assert rows_of(at_start[-1]) == [1]
    check_untouched(engine)
    engine.close()


def test_steps_that_are_not_recorded(at_start: list[DecodeGraph]) -> None:
    engine = engine_for("streaming")
    assert at_start[-1].recorded == 0
    check_untouched(engine)
    engine.close()


@pytest.mark.parametrize(("name", "value", "rows"), [("MAX_SECONDS", -1.0, []), ("MAX_BYTES", 2, [1]), ("", 0, None)])
def test_bounds(
    name: str, value: float, rows: list[int] | None, at_start: list[DecodeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of time, of bytes, and of numbers of rows."""
    if name:
        monkeypatch.setattr(record_steps, name, value)
    engine = engine_for("full", max_running=256)
    assert rows_of(at_start[-1]) == ([1, 2, 4, 8, 16, 24, 32, 48] if rows is None else rows)
    check_untouched(engine)
    engine.close()


@pytest.mark.parametrize("fails_at", [1, 3])
def test_an_engine_opens_though_it_fails(
    fails_at: int, at_start: list[DecodeGraph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, made = DecodeGraph._make, []

    def full(self: DecodeGraph, *args: Any) -> Any:
        made.append(0)
        if len(made) == fails_at:
            raise torch.OutOfMemoryError("no memory on the card")
        return real(self, *args)

    monkeypatch.setattr(DecodeGraph, "_make", full)
    with caplog.at_level(logging.WARNING):
        engine = engine_for("h2o")
    assert "no memory on the card" in caplog.text
    assert at_start[-1].recorded == fails_at - 1
    check_untouched(engine)
    found = answers(engine)
    monkeypatch.setattr(Engine, "_records_at_start", False)
    assert answers(launching(engine_for("h2o"))) == found


def test_no_room_for_pages(at_start: list[DecodeGraph], caplog: pytest.LogCaptureFixture) -> None:
    """A limit that holds requests, and not all of the dummy sequences."""
    engine = engine_for("h2o", kv_memory="256kB", max_running=64)
    assert "the page pool is full" in caplog.text
    assert 1 in rows_of(at_start[-1])
    check_untouched(engine)
    engine.close()


def test_on_a_cpu_nothing_is_recorded(graphs: list[DecodeGraph]) -> None:
    engine = engine_for("full")
    assert graphs[-1].recorded == 0
    engine.close()
