"""Decoding steps that are recorded and replayed: who gets one, how many are made, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from millpond.engine.engine import Engine
from millpond.errors import NumericsError
from millpond.kernels import ops
from millpond.kernels.cuda_graphs import graph_bytes
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
    answers(engine_for("full"), 40, new=60)  # pages of 4 tokens: 15 times one is added, up to 25
    assert graphs[-1].recorded == 1  # of 32 columns
    assert graphs[-1].replayed > 50


def test_few_graphs_while_caches_grow(graphs: list[DecodeGraph]) -> None:
    """From 10 pages to 64, for which tables have room at the end."""
    answers(engine_for("full"), 40, new=216)
    made = graphs[-1]._graphs.values()
    assert [graph.inputs.regions[0].plain.table.shape[1] for graph in made] == [32, 48, 64, 96]
    assert graphs[-1].recorded == 4


def test_sequences_that_come_and_go_make_few_graphs(graphs: list[DecodeGraph]) -> None:
    engine, lengths = engine_for("h2o", max_running=8), {40: 8, 57: 30, 31: 18, 33: 25, 45: 12, 52: 21, 36: 28, 29: 9}
    rows = []
    add(engine, *(ask(length, greedy(new)) for length, new in lengths.items()))
    real = graphs[-1].step
    graphs[-1].step = lambda ids, *rest: (rows.append(len(ids)), real(ids, *rest))[1]  # type: ignore[method-assign]
    done = {name: tokens(output) for name, output in finish(engine).items()}
    engine.close()
    assert len(set(rows)) >= 6  # numbers of sequences, in graphs of 8, 4, 2 and 1
    assert graphs[-1].recorded <= 4
    assert graphs[-1].replayed == len(rows) - graphs[-1].recorded  # all but the first of each
    for length, new in lengths.items():
        alone = engine_for("h2o")
        assert answers(launching(alone), length, new=new)[str(length)] == done[str(length)]


def test_numbers_that_go_to_and_fro_are_recorded(graphs: list[DecodeGraph]) -> None:
    """Two sequences, three, two, three: in graphs of 2 and 4."""
    engine = engine_for("full")
    add(engine, ask(40, greedy(90)), ask(57, greedy(90)))
    while not graphs[-1].replayed:
        engine.step()
    for n in range(4):
        engine.add(ask(30, greedy(2), name=f"more {n}"))
        while not any(output.finished for output in engine.step()):
            pass
        engine.step()
    assert graphs[-1].recorded == 2
    engine.close()


def test_rows_without_a_sequence_change_nothing(graphs: list[DecodeGraph]) -> None:
    """Logits and log-sum-exp of three sequences in a graph of four rows; what it holds is counted."""
    engine = engine_for("h2o")
    add(engine, *(ask(length, greedy(20)) for length in (40, 57, 31)))
    graph, seen = graphs[-1], []
    real = graph._compute

    def compute(ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out = real(ids, *rest)
        seen.append((len(ids), out))
        return out

    graph._compute = compute  # type: ignore[method-assign]
    while graph.replayed < 5:
        engine.step()
    (rows, (logits, lse)), (before, _) = seen[-1], seen[0]
    assert (before, rows) == (3, 4)
    assert bool((lse[:, 3] == -torch.inf).all())
    assert not bool((lse[:, :3] == -torch.inf).any())
    inputs = graph._graphs[1].inputs
    assert graph.nbytes == inputs.nbytes + 2 * 4 * 8 + logits.nbytes + lse.nbytes
    tables = [one.plain.table for one in inputs.regions]
    assert inputs.nbytes == sum(t.nbytes + 3 * 4 * len(t) for t in tables) + 4 * 4  # lengths, caps, recent; positions
    assert graph_bytes([(2, 4)] * len(tables), 4, tables[0].shape[1], logits.shape[1] * 4) == graph.nbytes
    engine.close()


@pytest.mark.in_turns(1, of=2)
@pytest.mark.parametrize("case", test_codecs.CASES)
def test_codes(case: str, graphs: list[DecodeGraph]) -> None:
    engine = test_codecs.engine_for(case)
    for n in test_codecs.LENGTHS:
        engine.add(test_codecs.ask(n))
    done = finish(engine)
    assert bool(graphs[-1].replayed > 20) == (case not in ("full by age", "h2o by age", "h2o int8 mikv"))
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
