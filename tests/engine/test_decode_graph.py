"""Decoding steps that are recorded and replayed: who gets one, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from millpond.engine.engine import Engine
from millpond.errors import NumericsError
from millpond.kernels import ops
from millpond.models.lean.decode_graph import DecodeGraph
from millpond.models.lean.decoder import Decoder
from millpond.prompt_marks import PromptMarks
from millpond.runner import native_forward
from millpond.runner.native_forward import NativeForward
from tests.engine import test_codecs
from tests.helpers.engine.helpers import BY_LAYER, METHODS, add, ask, engine_for, finish, greedy, tokens


def rehearsed(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """As a GPU records: the work is run once before."""
    work()
    return work


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[DecodeGraph]:
    """Engines made from now on record their steps, as work that is done again."""
    made: list[DecodeGraph] = []
    real = NativeForward.__init__

    def init(self: NativeForward, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        made.append(DecodeGraph(self._decoder.forward, rehearsed))
        self._graph = made[-1]

    monkeypatch.setattr(NativeForward, "__init__", init)
    monkeypatch.setattr(Decoder, "in_one_call", lambda self, n: None)
    return made


def launching(engine: Engine) -> Engine:
    """An engine that records nothing."""
    lean = engine._model._lean
    assert lean is not None
    lean._graph = None
    return engine


def answers(engine: Engine, *lengths: int, new: int = 12) -> dict[str, list[int]]:
    add(engine, *(ask(length, greedy(new)) for length in lengths or (40, 57)))
    done = {name: tokens(output) for name, output in finish(engine).items()}
    engine.close()
    return done


@pytest.mark.in_turns(1, of=2)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_steps_that_are_launched(method: str, graphs: list[DecodeGraph]) -> None:
    found = answers(engine_for(method))
    assert bool(graphs[-1].replayed) == (method not in BY_LAYER)
    assert answers(launching(engine_for(method))) == found


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt_neox"])
def test_families(family: str, graphs: list[DecodeGraph]) -> None:
    found = answers(engine_for(family=family), new=20)
    assert graphs[-1].replayed > 10
    assert answers(launching(engine_for(family=family)), new=20) == found


@pytest.mark.slow  # in the interpreter; on a GPU benchmarks/gpu/run_all.py
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt_neox"])
def test_the_kernels_of_a_gpu(family: str, graphs: list[DecodeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (pip install 'millpond[gpu]')")
    if torch.cuda.is_available():
        pytest.skip("Triton interprets nothing where there is a GPU")
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")
    found = answers(engine_for("h2o", family=family), new=8)
    assert graphs[-1].replayed > 4
    monkeypatch.setenv("MILLPOND_KERNELS", "reference")
    assert answers(engine_for("h2o", family=family), new=8) == found


def test_new_pages_do_not_make_another_graph(graphs: list[DecodeGraph]) -> None:
    answers(engine_for("full"), 40, new=60)  # pages of 4 tokens: 15 times one is added
    assert graphs[-1].recorded == 2  # when the tables were full, once more
    assert graphs[-1].replayed > 50


def test_a_batch_that_changes_is_recorded_again(graphs: list[DecodeGraph]) -> None:
    engine = engine_for("h2o")
    add(engine, ask(40, greedy(8)), ask(57, greedy(30)), ask(31, greedy(18)))
    done = {name: tokens(output) for name, output in finish(engine).items()}
    assert graphs[-1].recorded >= 2
    engine.close()
    for length, new in ((40, 8), (57, 30), (31, 18)):
        assert answers(engine_for("h2o"), length, new=new)[str(length)] == done[str(length)]


@pytest.mark.in_turns(1, of=2)
@pytest.mark.parametrize("case", test_codecs.CASES)
def test_codes(case: str, graphs: list[DecodeGraph]) -> None:
    engine = test_codecs.engine_for(case)
    for n in test_codecs.LENGTHS:
        engine.add(test_codecs.ask(n))
    done = finish(engine)
    assert bool(graphs[-1].replayed > 20) == (case not in ("full by age", "h2o by age"))
    assert {n: tokens(done[str(n)]) for n in test_codecs.LENGTHS} == {
        n: test_codecs.alone(case, n) for n in test_codecs.LENGTHS
    }
    engine.close()


def test_spans_are_launched(graphs: list[DecodeGraph]) -> None:
    engine = engine_for("h2o")
    add(engine, ask(40, marks=PromptMarks(keep=((3, 7),))))
    finish(engine)
    assert graphs[-1].replayed == 0
    engine.close()


def test_nan_ends_a_request(graphs: list[DecodeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for()
    add(engine, ask(40, greedy(20)))
    while not graphs[-1].replayed:
        engine.step()
    real = ops.decode
    monkeypatch.setattr(
        native_forward.ops, "decode", lambda args: (found := real(args))._replace(lse=found.lse * torch.nan)
    )
    output = finish(engine)["40"]
    assert isinstance(output.error, NumericsError)
    engine.close()
