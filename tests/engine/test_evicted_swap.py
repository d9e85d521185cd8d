"""Preempted requests of methods that evict wait as codes, and go on with the entries that were kept, in their slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from millpond.engine.engine import Engine
from millpond.engine.request_state import RequestState
from millpond.errors import OptionError
from tests.helpers.engine.coded import agreement, answer, asked, engine_of, first_choices, prompt, run
from tests.helpers.engine.evicted import EVICTING, held, state_of
from tests.helpers.hf.transform import transform_of_tiny

N, NEW, PAST = 460, 40, 12


def preempt(engine: Engine, name: str) -> RequestState:
    """Swap a running request out, as if there were no room for it."""
    state = state_of(engine, name)
    victim = engine._scheduler.preempt_newest()
    assert victim is state.scheduled
    engine._preemptor._preempt(victim)
    engine._scheduler._closed = False
    engine.check_integrity()
    return state


def resume(engine: Engine, state: RequestState) -> None:
    """Decode what waits, and take it back into the pool without a step."""
    cache = state.private_cache
    assert cache is not None
    assert cache.is_coded
    assert cache.prepare_swap_in(wait=True)
    engine._preemptor._resume(state.scheduled)


def undisturbed(options: dict[str, Any], **how: Any) -> list[int]:
    engine = engine_of(preemption="codes", **options)
    engine.add(asked("alone", prompt(N, 3), NEW, **how))
    found = answer(run(engine)["alone"])
    engine.close()
    return found


@pytest.mark.parametrize("method", EVICTING)
def test_what_was_kept_comes_back_into_its_slots(method: str) -> None:
    options = EVICTING[method]
    expected = undisturbed(options)
    engine = engine_of(preemption="codes", **options)
    engine.add(asked("moved", prompt(N, 3), NEW, known=expected))
    run(engine, PAST)
    before = held(engine, "moved")
    state = preempt(engine, "moved")
    assert state.private_cache is not None
    waiting = state.private_cache._coded
    assert waiting is not None
    waiting._coded.result()
    plain = sum(one[side].nbytes for one in before for side in ("keys", "values"))
    assert state.private_cache.swapped_bytes < 0.75 * plain
    state.scheduled.status = state.scheduled.status.__class__.DECODE
    resume(engine, state)
    engine.check_integrity()
    for one, other in zip(before, held(engine, "moved"), strict=True):
        assert not torch.equal(one["keys"], other["keys"])
        for part in one.keys() - {"keys", "values"}:
            assert torch.equal(one[part], other[part]), part
    engine.close()


@pytest.mark.parametrize("method", EVICTING)
def test_first_choices_are_those_of_the_undisturbed_answer(method: str) -> None:
    options = EVICTING[method]
    expected = undisturbed(options)
    engine = engine_of(preemption="codes", **options)
    engine.add(asked("moved", prompt(N, 3), NEW, known=expected))
    for turn in range(3):
        run(engine, PAST + 5 * turn)
        state = preempt(engine, "moved")
        assert state.private_cache is not None
        assert state.private_cache.is_coded
        while state.scheduled.status.value == "preempted":
            engine.step()
    output = run(engine)["moved"]
    assert agreement(first_choices(output), expected) >= 0.94
    kv = output.completions[0].kv
    assert kv is not None
    assert (kv.decoded_tokens, kv.exact) == (N, False)
    assert engine.stats().encode_s > 0
    engine.close()


def test_several_answers_go_on() -> None:
    engine = engine_of(preemption="codes", **EVICTING["snapkv"])
    engine.add(asked("both", prompt(N, 3), NEW, n=2))
    run(engine, PAST)
    preempt(engine, "both")
    output = run(engine)["both"]
    assert [len(answer(output, index)) for index in range(2)] == [NEW, NEW]
    engine.close()


def test_a_prompt_that_is_being_read_waits_as_it_is() -> None:
    expected = undisturbed(EVICTING["h2o"])
    engine = engine_of(preemption="codes", max_step_tokens=100, **EVICTING["h2o"])
    engine.add(asked("reads", prompt(N, 3), NEW))
    for _ in range(3):
        engine.step()
    state = preempt(engine, "reads")
    assert state.private_cache is not None
    assert not state.private_cache.is_coded
    assert answer(run(engine)["reads"]) == expected
    assert state.exact
    engine.close()


def test_a_request_with_damaged_codes_reads_its_prompt_again() -> None:
    expected = undisturbed(EVICTING["h2o"])[:30]
    engine = engine_of(preemption="codes", **EVICTING["h2o"])
    engine.add(asked("other", prompt(50, 4), 60, priority=-1))
    engine.add(asked("waits", prompt(N, 3), 30))
    run(engine, PAST)
    state = preempt(engine, "waits")
    assert state.private_cache is not None
    assert state.private_cache._coded is not None
    (layers,) = state.private_cache._coded._coded.result()
    assert isinstance(layers, list)
    layers[1]["codes.pages"][20] ^= 1
    found = run(engine)
    assert answer(found["waits"]) == expected
    assert state.exact
    assert len(answer(found["other"])) == 60
    assert engine.stats().kv_bytes == 0
    engine.close()


def test_a_file_without_parts_for_single_heads_is_refused_at_start() -> None:
    without = replace(transform_of_tiny("gqa"), heads=())
    with pytest.raises(OptionError, match=r"'h2o': .*no parts for single heads.*millpond calibrate"):
        engine_of(preemption="codes", calibration=without, **EVICTING["h2o"])
