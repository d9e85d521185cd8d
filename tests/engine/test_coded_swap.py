"""Preempted requests wait as codes: in less memory, with answers that hardly differ, and never coded twice."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from millpond.cache.coded.swap import CodedSequences
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import CacheOptions
from millpond.engine.request_state import RequestState
from millpond.errors import NumericsError, OptionError
from tests.helpers.engine.coded import CODEC, agreement, answer, asked, engine_of, first_choices, prompt, run

N, NEW = 600, 40
PAST = 12  # tokens of the answer when it is preempted


def state_of(engine: Engine, name: str) -> RequestState:
    state = engine._requests.get(name)
    assert state is not None
    return state


def preempt(engine: Engine, name: str) -> RequestState:
    """Swap a running request out, as if there were no room for it."""
    state = state_of(engine, name)
    victim = engine._scheduler.preempt_newest()
    assert victim is state.scheduled
    engine._preemptor._preempt(victim)
    engine._scheduler._closed = False
    engine.check_integrity()
    return state


def interrupted(engine: Engine, request: Any, at: int = PAST, times: int = 1) -> tuple[RequestOutput, list[Any]]:
    """The output of a request that is preempted some times, and the codes of its answers each time."""
    engine.add(request)
    codes = []
    for turn in range(times):
        run(engine, at + turn)
        state = preempt(engine, request.request_id)
        while state.scheduled.status.value == "preempted":
            engine.step()
        codes.append([completion.codes for completion in state.completions])
    return run(engine)[request.request_id], codes


def undisturbed(kind: str = "gqa", **how: Any) -> list[int]:
    engine = engine_of(kind, preemption="codes")
    engine.add(asked("alone", prompt(N, 3), NEW, **how))
    found = answer(run(engine)["alone"])
    engine.close()
    return found


@pytest.mark.parametrize(("kind", "bits", "least"), [("gqa", 1.5, 0.94), ("sliding", 1.5, 0.94), ("biases", 4, 0.9)])
def test_first_choices_are_those_of_the_undisturbed_answer(kind: str, bits: float, least: float) -> None:
    """A random model with biases has close rivals: what it shows is that the codes are those of its keys."""
    expected = undisturbed(kind)
    engine = engine_of(kind, preemption="codes", storage_codec=f"transform:{bits}")
    output, ((codes,),) = interrupted(engine, asked("moved", prompt(N, 3), NEW, known=expected))
    assert agreement(first_choices(output), expected) >= least
    kv = output.completions[0].kv
    assert kv is not None
    assert (kv.decoded_tokens, kv.exact) == (N, False)
    assert min(engine.stats().encode_s, engine.stats().decode_s) > 0
    assert codes.n_pages == (N + PAST - 1 - 64) // 32
    assert any((layer.at < codes.n_pages * 32).sum() > 4 for layer in codes.layers), "tokens are exact by attention"
    engine.close()


def test_a_request_makes_room_for_one_of_better_priority() -> None:
    """Without anything planted: there is memory for one of the two."""
    expected = undisturbed()
    engine = engine_of(preemption="codes")
    engine.add(asked("measured", prompt(N, 3), NEW))
    need = state_of(engine, "measured").scheduled.memory_need.peak(1)
    engine.close()
    engine = engine_of(preemption="codes", kv_memory=int(1.4 * need))
    engine.add(asked("waits", prompt(N, 3), NEW, known=expected))
    run(engine, PAST)
    engine.add(asked("first", prompt(N, 5), 4, priority=-1))
    found = run(engine)
    assert engine.stats().preemptions == 1
    assert len(answer(found["first"])) == 4
    assert agreement(first_choices(found["waits"]), expected) >= 0.94
    kv = found["waits"].completions[0].kv
    assert kv is not None
    assert kv.decoded_tokens == N
    engine.close()


def test_codes_take_a_fraction_of_the_memory() -> None:
    sizes = []
    for preemption in ("swap", "codes"):
        engine = engine_of(preemption=preemption)
        engine.add(asked("one", prompt(N, 3), NEW))
        run(engine, PAST)
        state = preempt(engine, "one")
        assert state.private_cache is not None
        coded = state.private_cache._coded
        if coded is not None:
            coded._coded.result()
        stats = engine._parts.stats()
        assert (stats.kv_bytes, stats.swapped_bytes) == (0, state.private_cache.swapped_bytes)
        sizes.append(stats.swapped_bytes)
        engine.close()
    assert sizes[1] < 0.25 * sizes[0]


def test_what_was_decoded_is_never_coded_again() -> None:
    engine = engine_of(preemption="codes")
    _, codes = interrupted(engine, asked("often", prompt(N, 3), 80), at=PAST, times=3)
    first = codes[0][0]
    for (later,) in codes[1:]:
        for one, other in zip(first.layers, later.layers, strict=True):
            assert torch.equal(other.pages[0][: len(one.pages[0])], one.pages[0])
    engine.close()


def test_several_answers_share_the_codes_of_their_prompt() -> None:
    engine = engine_of(preemption="codes")
    output, (codes,) = interrupted(engine, asked("both", prompt(N, 3), NEW, n=2))
    one, two = codes
    shared = (N - 64) // 32
    assert torch.equal(one.layers[0].pages[0][:shared], two.layers[0].pages[0][:shared])
    assert len(answer(output, 1)) == NEW
    engine.close()


def test_a_prompt_that_is_being_read_goes_on() -> None:
    expected = undisturbed()
    engine = engine_of(preemption="codes", max_step_tokens=100)
    engine.add(asked("reads", prompt(N, 3), NEW, known=expected))
    for _ in range(4):
        engine.step()
    state = preempt(engine, "reads")
    output = run(engine)["reads"]
    assert state.tainted
    assert not state.exact
    assert agreement(first_choices(output), expected) >= 0.94
    engine.close()


@pytest.mark.parametrize("how", [{"prompt_logprobs": 1}, {"cache": "streaming"}])
def test_exact_requests_and_methods_without_codes_are_swapped_as_they_are(how: dict[str, Any]) -> None:
    options = {"cache": CacheOptions(method="streaming", budget="50%")} if "cache" in how else how
    engine = engine_of(preemption="codes")
    engine.add(asked("alone", prompt(N, 3), NEW, **options))
    expected = answer(run(engine)["alone"])
    output, codes = interrupted(engine, asked("moved", prompt(N, 3), NEW, **options))
    assert codes == [[None]]
    assert answer(output) == expected
    engine.close()


def test_tokens_that_were_decoded_from_blocks_are_not_coded_again() -> None:
    engine = engine_of(preemption="codes", prefix_cache=True)
    engine.add(asked("moved", prompt(N, 3), NEW))
    run(engine, PAST)
    state_of(engine, "moved").decoded = 64
    state = preempt(engine, "moved")
    assert state.private_cache is not None
    assert not state.private_cache.is_coded
    assert len(answer(run(engine)["moved"])) == NEW
    engine.close()


def test_others_step_on_while_codes_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    gate: Future[None] = Future()
    decode = CodedSequences._decode

    def late(self: CodedSequences) -> Any:
        gate.result(60)
        return decode(self)

    monkeypatch.setattr(CodedSequences, "_decode", late)
    engine = engine_of(preemption="codes")
    engine.add(asked("other", prompt(50, 4), 60, priority=-1))
    engine.add(asked("waits", prompt(N, 3), 30))
    run(engine, PAST)
    state = preempt(engine, "waits")
    before = len(state_of(engine, "other").completions[0].tokens)
    for _ in range(5):
        engine.step()
    assert state.scheduled.is_loading
    assert len(state_of(engine, "other").completions[0].tokens) == before + 5
    gate.set_result(None)
    assert len(answer(run(engine)["waits"])) == 30
    engine.close()


def test_a_request_with_damaged_codes_reads_its_prompt_again() -> None:
    expected = undisturbed()[:30]
    engine = engine_of(preemption="codes")
    engine.add(asked("other", prompt(50, 4), 60, priority=-1))
    engine.add(asked("waits", prompt(N, 3), 30))
    run(engine, PAST)
    state = preempt(engine, "waits")
    assert state.private_cache is not None
    assert state.private_cache._coded is not None
    (text,) = state.private_cache._coded._coded.result()
    text.layers[1].pages[0][2, 20] ^= 1
    found = run(engine)
    assert answer(found["waits"]) == expected
    assert state.exact
    assert len(answer(found["other"])) == 60
    assert engine.stats().kv_bytes == 0


def test_a_request_whose_codes_cannot_be_made_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: CodedSequences) -> Any:
        raise NumericsError("no number")

    monkeypatch.setattr(CodedSequences, "_code", broken)
    engine = engine_of(preemption="codes")
    engine.add(asked("other", prompt(50, 4), 60, priority=-1))
    engine.add(asked("waits", prompt(N, 3), 30))
    run(engine, PAST)
    preempt(engine, "waits")
    found = run(engine)
    assert isinstance(found["waits"].error, NumericsError)
    assert len(answer(found["other"])) == 60
    assert engine.stats().kv_bytes == 0
    engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage_codec": None}, "give storage_codec"),
        ({"deterministic": True}, "deterministic=True promises equal"),
        ({"swap_to": "somewhere"}, "leave one of the two out"),
        ({"preemption": "drop"}, "preemption"),
    ],
)
def test_settings_that_contradict(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        EngineConfig(**({"storage_codec": CODEC, "preemption": "codes", "method": "full"} | options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "h2o", "budget": "50%", "codec": "int8"}, "'h2o'.*codec 'int8' has codes already"),
        ({"method": "cam", "budget": "50%"}, "'cam'.*merges entries"),
        ({"codec": "int4"}, "'int4' leaves only codes"),
        ({"codec": "int8"}, "pages of codes stay as they are"),
    ],
)
def test_caches_without_codes_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        engine_of(preemption="codes", **options)
