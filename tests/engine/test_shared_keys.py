"""Layers that share keys in the engine: each request answers as `generate` does alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import CacheOptions, Request
from tests.helpers.engine.alone import BUDGETS, LENGTHS, NEW, WITHIN, alone, ask, engine_for, model_of
from tests.helpers.engine.helpers import add, finish, greedy, prompt, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.FewEntriesWarning"),
    pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning"),
]
TYPES = ["gemma3n_text", "gemma4_text", pytest.param("gemma4_unified_text", marks=pytest.mark.slow)]


@pytest.mark.covering
@pytest.mark.parametrize("method", sorted(BUDGETS))
@pytest.mark.parametrize("kind", TYPES)
def test_batched_and_in_chunks_as_alone(kind: str, method: str) -> None:
    engine = engine_for(kind, method)
    add(engine, *(ask(length, logprobs=0) for length in LENGTHS))
    done = finish(engine)
    engine.close()
    for length in LENGTHS:
        expected, scores = alone(kind, method, length)
        assert tokens(done[str(length)]) == expected
        found = done[str(length)].completions[0].logprobs
        assert found is not None
        apart = (torch.tensor([one.logprob for one in found]) - scores).abs().max()
        assert apart < WITHIN * max(1.0, float(scores.abs().max()))


@pytest.mark.covering
@pytest.mark.parametrize("step_tokens", [1, 7, 500])
@pytest.mark.parametrize("kind", TYPES)
def test_the_size_of_chunks_changes_nothing(kind: str, step_tokens: int) -> None:
    engine = engine_for(kind, max_step_tokens=step_tokens)
    add(engine, ask(40), ask(31))
    done = finish(engine)
    engine.close()
    for length in (40, 31):
        assert tokens(done[str(length)]) == alone(kind, "h2o", length)[0]


@pytest.mark.covering
@pytest.mark.parametrize("to_files", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_preempted_and_resumed_as_alone(kind: str, to_files: bool, tmp_path: Path) -> None:
    most, engine = 0, engine_for(kind, "full")
    add(engine, ask(57))
    while engine.busy:
        engine.step()
        most = max(most, engine.stats().kv_bytes)
    engine.close()
    engine = engine_for(kind, "full", kv_memory=int(2.2 * most), overcommit=4, swap_to=tmp_path if to_files else None)
    add(engine, *map(ask, LENGTHS))
    done: dict[str, RequestOutput] = {}
    while engine.busy:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
    assert engine.stats().preemptions > 0
    assert engine.stats().kv_reserved == 0
    engine.close()
    for length in LENGTHS:
        assert tokens(done[str(length)]) == alone(kind, "full", length)[0]


@pytest.mark.parametrize("kind", TYPES)
def test_several_answers_and_repeated_prefixes(kind: str) -> None:
    """Answers of one prompt share its pages, and so do requests that begin alike."""
    engine = engine_for(kind, "full", prefix_cache=True)
    add(engine, ask(57, n=3), ask(40))
    done = {output.request_id: output for output in engine.drain()}
    assert [tokens(done["57"], index) for index in range(3)] == [alone(kind, "full", 57)[0]] * 3
    add(engine, ask(57, "again"))
    assert tokens(engine.drain()[0]) == alone(kind, "full", 57)[0]
    assert engine.stats().shared_tokens > 0
    engine.close()


def test_entries_of_those_that_share_take_nothing() -> None:
    """Two of four layers hold entries; a page has 4 slots, of keys and values of all KV heads in float32."""
    engine = engine_for("gemma3n_text", "full")
    add(engine, ask(57))
    (done,) = finish(engine).values()
    engine.close()
    kv = done.completions[0].kv
    assert kv is not None
    wide = model_of("gemma3n_text").config.head_dim * model_of("gemma3n_text").config.num_key_value_heads * 2 * 4
    assert 0 < kv.kv_bytes <= 2 * (57 + NEW + 4) * wide


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(mp.UnsupportedModelError, match="runner='modules' runs it"):
        Engine(model_of("gemma3n_text"), runner="lean")
    engine = Engine(model_of("gemma3n_text"), method="full")
    options = CacheOptions(method="streaming", budget="50%")
    with pytest.raises(mp.UnsupportedModelError, match=r"lets layers 2, 3 read .* use positions=\"absolute\""):
        add(engine, Request(request_id="r", prompt=prompt(31), params=greedy(2), cache=options))
    engine.close()
