"""Hybrids in the engine: states go where the requests go, and each answers as `generate` does alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond_lab.bench.model_types.tiny_model import tiny_model
from tests.helpers.engine.alone import BUDGETS, LENGTHS, WITHIN, alone, ask, engine_for, model_of
from tests.helpers.engine.helpers import add, finish, prompt, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.FewEntriesWarning"),
    pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning"),
]
FAST = ["lfm2", "qwen3_next", "bamba"]
#: With the ones above all hybrids that write text, but for those that store latents.
OTHERS = [
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "zamba",
    "zamba2",
    "zaya",
]
ALL = [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]


def check(kind: str, method: str, done: dict[str, RequestOutput]) -> None:
    for length in LENGTHS:
        assert tokens(done[str(length)]) == alone(kind, method, length)[0]


@pytest.mark.covering
@pytest.mark.parametrize("method", sorted(BUDGETS))
@pytest.mark.parametrize("kind", ALL)
def test_batched_and_in_chunks_as_alone(kind: str, method: str) -> None:
    engine = engine_for(kind, method)
    add(engine, *(ask(length, logprobs=0) for length in LENGTHS))
    done = finish(engine)
    engine.close()
    check(kind, method, done)
    for length in LENGTHS:
        found = done[str(length)].completions[0].logprobs
        assert found is not None
        expected = alone(kind, method, length)[1]
        scale = max(1.0, float(expected.abs().max()))
        assert (torch.tensor([one.logprob for one in found]) - expected).abs().max() < WITHIN * scale


@pytest.mark.covering
@pytest.mark.parametrize("step_tokens", [1, 7, 500])
@pytest.mark.parametrize("kind", FAST)
def test_the_size_of_chunks_changes_nothing(kind: str, step_tokens: int) -> None:
    engine = engine_for(kind, max_step_tokens=step_tokens)
    add(engine, ask(40), ask(31))
    done = finish(engine)
    engine.close()
    for length in (40, 31):
        assert tokens(done[str(length)]) == alone(kind, "h2o", length)[0]


def bytes_for_two(kind: str) -> int:
    """About what two requests hold, states and entries together."""
    engine = engine_for(kind, "full")
    add(engine, ask(57))
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine.stats().kv_bytes + engine.stats().state_bytes)
    engine.close()
    return int(2.2 * most)


@pytest.mark.covering
@pytest.mark.parametrize("to_files", [False, True])
@pytest.mark.parametrize("kind", FAST)
def test_preempted_and_resumed_as_alone(kind: str, to_files: bool, tmp_path: Path) -> None:
    limit = bytes_for_two(kind)
    engine = engine_for(kind, "full", kv_memory=limit, overcommit=4, swap_to=tmp_path if to_files else None)
    add(engine, *map(ask, LENGTHS))
    done: dict[str, RequestOutput] = {}
    while engine.busy:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
        assert engine.stats().kv_reserved <= limit
        assert len(list(tmp_path.rglob("*.safetensors"))) == engine.stats().swapped * to_files
    assert engine.stats().preemptions > 0
    assert engine.stats().kv_reserved == 0
    engine.close()
    check(kind, "full", done)


@pytest.mark.parametrize("kind", FAST)
def test_states_come_back_bit_for_bit(kind: str) -> None:
    engine = engine_for(kind)
    add(engine, ask(40), ask(31))
    while not all(engine.cache_of(name) and engine.stats().generated_tokens > 6 for name in ("40", "31")):
        engine.step()
    found = engine.cache_of("40")
    assert found is not None
    batch_cache, states = found[0], found[0].states
    assert states is not None
    assert states.n_seq == batch_cache.n_seq == 2
    before, counted = states.copy_out(), engine.stats().state_bytes
    assert sum(state.nbytes for state in before) == counted
    batch_cache.swap_out()
    assert states.nbytes() == states.n_seq == 0
    assert states.slots is not None
    assert batch_cache.pages_to_swap_in()[states.slots] == 2
    batch_cache.swap_in()
    after = states.copy_out()
    assert len(before) == len(after) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    engine.check_integrity()
    finish(engine)
    engine.close()


@pytest.mark.parametrize("kind", FAST)
def test_several_answers_have_states_of_their_own(kind: str) -> None:
    engine = engine_for(kind, "full")
    add(engine, ask(57, n=3), ask(40))
    done = finish(engine)
    assert [tokens(done["57"], index) for index in range(3)] == [alone(kind, "full", 57)[0]] * 3
    assert tokens(done["40"]) == alone(kind, "full", 40)[0]
    params = mp.SamplingParams(max_tokens=12, temperature=1.5, n=4, seed=3)
    add(engine, Request(request_id="drawn", prompt=prompt(40), params=params))
    drawn = finish(engine)["drawn"]
    engine.close()
    assert len({tuple(tokens(drawn, index)) for index in range(4)}) > 1


@pytest.mark.covering
@pytest.mark.parametrize("when", [1, 2, 5])
@pytest.mark.parametrize("kind", FAST)
def test_a_cancelled_request_leaves_nothing(kind: str, when: int) -> None:
    engine = engine_for(kind, "full")
    add(engine, ask(57), ask(40), ask(31))
    for _ in range(when):
        engine.step()
    engine.cancel("57")
    engine.check_integrity()
    done = finish(engine)  # which checks that no byte is left
    assert engine.stats().state_bytes == 0
    engine.close()
    assert done["57"].completions[0].finish_reason == "cancelled"
    for length in (40, 31):
        assert tokens(done[str(length)]) == alone(kind, "full", length)[0]


def test_states_are_counted_and_admitted_by() -> None:
    engine = engine_for("qwen3_next")
    add(engine, ask(1, "one"))
    engine.step()
    (each,) = {engine.stats().state_bytes}
    states = engine.cache_of("one")[0].states  # type: ignore[index]
    assert states is not None
    assert each == states.nbytes() > 0
    assert engine.stats().kv_reserved >= each + engine.stats().kv_bytes
    done = finish(engine)["one"]
    engine.close()
    assert done.completions[0].kv is not None
    assert done.completions[0].kv.state_bytes == each

    tight = engine_for("qwen3_next", kv_memory=each + 1000)
    with pytest.raises(mp.BudgetError, match="bytes of cache"):
        add(tight, ask(31))
    tight.close()
    tight = engine_for("qwen3_next", kv_memory=each + 30_000)
    add(tight, ask(1, "a"), ask(1, "b"))  # entries of both would fit, and states of one
    tight.step()
    assert (tight.stats().running, tight.stats().waiting) == (1, 1)
    finish(tight)
    tight.close()


@pytest.mark.parametrize("kind", FAST)
def test_repeated_prefixes_are_read_again(kind: str) -> None:
    """The states at the end of a shared prefix are not kept, so nothing is shared."""
    engine = engine_for(kind, "full", prefix_cache=True)
    for turn in range(2):
        add(engine, ask(57, str(turn)))
        done = finish(engine)
        assert tokens(done[str(turn)]) == alone(kind, "full", 57)[0]
    assert engine.stats().shared_tokens == 0
    engine.close()


def test_prompts_whose_states_begin_at_zero_in_each_pass_are_read_whole() -> None:
    engine = engine_for("jamba", max_step_tokens=8)
    add(engine, ask(40), ask(31))
    done = finish(engine)
    engine.close()
    for length in (40, 31):
        assert tokens(done[str(length)]) == alone("jamba", "h2o", length)[0]


def test_the_model_is_its_own_again() -> None:
    model = tiny_model("lfm2")
    own = [vars(module).get("forward") for module in model.modules()]
    first, second = Engine(model, method="full"), Engine(model, method="full")
    add(first, ask(31))
    first.close()
    add(second, ask(31))
    assert tokens(second.drain()[0]) == alone("lfm2", "full", 31)[0]
    second.close()
    assert [vars(module).get("forward") for module in model.modules()] == own


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(mp.UnsupportedModelError, match="caches latents"):
        Engine(tiny_model("kimi_linear"))
    with pytest.raises(mp.UnsupportedModelError, match="runner='modules' runs it"):
        Engine(model_of("lfm2"), runner="lean")
    model = tiny_model("lfm2")
    mixer = model.model.layers[0].conv
    mixer.forward = lambda *args, **kwargs: type(mixer).forward(mixer, *args, **kwargs)
    with pytest.raises(mp.UnsupportedModelError, match="Lfm2ShortConv of Lfm2ForCausalLM has a forward of its own"):
        Engine(model)
