"""Requests that move between two engines: the tokens that they would have had, and pages on neither side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import millpond as mp
from millpond.cache.state import gap_closing, sequence_state
from millpond.cache.state.gap_closing import GapClosing
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.errors import CacheMismatchError, DataError, OptionError, PoolFullError
from millpond.typed_json import from_json
from tests.helpers.engine.helpers import METHODS, add, budget_of, engine_for, prompt, tokens
from tests.helpers.hf.families import shared_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens

LENGTH, NEW = 90, 12


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Engine, Engine]]:
    """Two engines of one model, with pages of different sizes."""
    first, second = engine_for("h2o"), engine_for("h2o", page_slots=8, max_step_tokens=64)
    yield first, second
    first.close()
    second.close()


def request(name: str, method: str = "h2o", n: int = 1, **params: Any) -> Request:
    chosen = mp.SamplingParams(**{"max_tokens": NEW, "temperature": 0, "ignore_eos": True, "n": n} | params)
    cache = CacheOptions(method=method, options=METHODS.get(method, {}), budget=budget_of(method))
    return Request(request_id=name, prompt=prompt(LENGTH), params=chosen, cache=cache)


def run(engine: Engine, until: int | None = None) -> list[RequestOutput]:
    """Step to the end, or until the first answer of a request has so many tokens; the last outputs."""
    found: list[RequestOutput] = []
    while engine.busy:
        found = engine.step() or found
        engine.check_integrity()
        if until is not None and found and len(tokens(found[0])) >= until:
            break
    return found


def undisturbed(engine: Engine, asked: Request) -> RequestOutput:
    add(engine, asked)
    (found,) = run(engine)
    return found


def moved(first: Engine, second: Engine, asked: Request, at: int) -> RequestOutput:
    add(first, asked)
    run(first, at)
    data = first.export_request(asked.request_id)
    first.check_integrity()
    assert not first.busy
    assert first.stats().kv_bytes == 0
    assert second.import_request(data) == asked.request_id
    (found,) = run(second)
    assert second.stats().kv_bytes == 0
    return found


#: Methods that between them remember everything that a cache can remember; the others are slow tests.
SOME = ("ada", "d2o", "fastgen", "full", "h2o", "infllm", "minference", "snapkv", "streaming")


@pytest.mark.parametrize(
    "method", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in sorted(METHODS)]
)
def test_every_method_continues_elsewhere(pair: tuple[Engine, Engine], method: str) -> None:
    first, second = pair
    expected = undisturbed(second, request("alone", method))
    found = moved(first, second, request("moved", method), at=1 + len(method) % 7)
    assert tokens(found) == tokens(expected)
    assert len(tokens(found)) == NEW


def test_closed_gaps_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a text is longer than the model's positions, entries have places inside the cache."""
    monkeypatch.setattr(sequence_state, "GapClosing", lambda rotary, _: GapClosing(rotary, 100))
    monkeypatch.setattr(gap_closing, "MIN_CLOSING_DISTANCE", 8)
    first, second = engine_for("h2o"), engine_for("h2o", page_slots=8)
    cache = CacheOptions(method="h2o", options={"positions": "cache_relative"}, budget=24)
    asked = replace(request("long", max_tokens=40), cache=cache)
    expected = undisturbed(second, asked)
    add(first, asked)
    run(first, 20)
    found = first.cache_of("long")
    assert found is not None
    rolling = found[0].layers[0].sequence_state.rolling
    assert rolling is not None
    assert rolling.frames[0] > 0, "gaps were closed"
    second.import_request(first.export_request("long"))
    assert [tokens(output) for output in run(second)] == [tokens(expected)]
    first.close()
    second.close()


def test_three_answers_travel_once_and_apart(pair: tuple[Engine, Engine]) -> None:
    """Behind the first token they share all pages; later each has entries of its own."""
    first, second = pair
    sampled = {"n": 3, "seed": 5, "temperature": 0.8}
    expected = undisturbed(second, request("alone", "full", **sampled))
    assert len({found.token_ids for found in expected.completions}) == 3
    sizes = []
    for at in (1, 6):
        asked = request("moved", "full", **sampled)
        add(first, asked)
        run(first, at)
        sizes.append(len(data := first.export_request("moved")))
        second.import_request(data)
        (found,) = run(second)
        assert [one.token_ids for one in found.completions] == [one.token_ids for one in expected.completions]
    assert sizes[1] > 2.5 * sizes[0]


def test_answers_that_have_ended_go_with_those_that_continue(pair: tuple[Engine, Engine]) -> None:
    first, second = pair
    sampled: dict[str, Any] = {"n": 2, "seed": 5, "temperature": 0.8}
    plain = undisturbed(second, request("plain", **sampled))
    ends = plain.completions[0].token_ids[2]
    assert ends not in plain.completions[1].token_ids[:4]
    sampled["stop_token_ids"] = (ends,)
    expected = undisturbed(second, request("alone", **sampled))
    add(first, request("moved", **sampled))
    while True:
        found = first.step()
        if found and found[0].completions[0].finish_reason is not None:
            break
    second.import_request(first.export_request("moved"))
    (found,) = run(second)
    assert [(one.token_ids, one.finish_reason) for one in found.completions] == [
        (one.token_ids, one.finish_reason) for one in expected.completions
    ]


def test_everything_about_an_answer_goes_on(pair: tuple[Engine, Engine]) -> None:
    first, second = pair
    params: dict[str, Any] = {
        "temperature": 0.9,
        "seed": 11,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "logit_bias": {5: 1.5},
        "min_tokens": 3,
        "top_p": 0.9,
    }
    expected = undisturbed(second, request("alone", "snapkv", **params))
    found = moved(first, second, request("moved", "snapkv", **params), at=4)
    assert tokens(found) == tokens(expected)
    for a, b in (
        (found.completions[0].logprobs, expected.completions[0].logprobs),
        (found.prompt_logprobs, expected.prompt_logprobs),
    ):
        assert a is not None
        assert b is not None
        assert [one and (one.token_id, [token for token, _, _ in one.top]) for one in a] == [
            one and (one.token_id, [token for token, _, _ in one.top]) for one in b
        ]
        assert [one.logprob for one in a if one] == pytest.approx([one.logprob for one in b if one], abs=1e-4)


def test_draws_without_a_seed_go_on_from_the_seed_that_was_drawn(pair: tuple[Engine, Engine]) -> None:
    first, _ = pair
    asked = request("drawn", "full", temperature=1.0)
    add(first, asked)
    run(first, 3)
    data = first.export_request("drawn")
    found = []
    for engine in pair:  # both continue it alike
        engine.import_request(data)
        found += [tokens(output) for output in run(engine)]
    assert found[0] == found[1]
    assert len(found[0]) == NEW


def test_what_was_not_read_yet_is_read_there(pair: tuple[Engine, Engine]) -> None:
    first, second = pair
    expected = undisturbed(second, request("alone"))
    for steps in (0, 2):  # waiting, and in the middle of its prompt
        add(first, request("moved"))
        for _ in range(steps):
            first.step()
        data = first.export_request("moved")
        assert first.stats().kv_bytes == 0
        assert len(data) < 3_000, "a cache that will be read again does not travel"
        second.import_request(data)
        (found,) = run(second)
        assert tokens(found) == tokens(expected)


def bytes_of(asked: Request) -> int:
    """Most bytes that a request may hold, in pages of 4 slots."""
    engine = engine_for("h2o")
    most = engine._validator.validate(asked).scheduled.memory_need.peak(asked.params.n)
    engine.close()
    return most


def test_a_request_that_is_swapped_out_moves(pair: tuple[Engine, Engine]) -> None:
    _, second = pair
    asked = [replace(request(name, "full"), priority=-index) for index, name in enumerate("ab")]
    expected = [tokens(undisturbed(second, one)) for one in asked]
    narrow = engine_for("h2o", kv_memory=int(1.5 * bytes_of(asked[0])))
    add(narrow, asked[0])
    run(narrow, 3)
    add(narrow, asked[1])  # of a better priority: the first makes room
    run(narrow, 1)
    assert narrow.stats().swapped == 1
    with pytest.raises(PoolFullError, match="'a' is swapped out"):
        narrow.export_request("a")
    assert narrow.stats().swapped == 1
    data = [narrow.export_request("b"), narrow.export_request("a")]
    narrow.check_integrity()
    assert narrow.stats().kv_reserved == 0
    narrow.close()
    found = []
    for one in data:
        second.import_request(one)
        found += [tokens(output) for output in run(second)]
    assert found == expected[::-1]


def test_full_pools_other_models_and_names_in_use(pair: tuple[Engine, Engine]) -> None:
    first, _ = pair
    add(first, request("moved", "full"))
    run(first, 4)
    data = first.export_request("moved")
    small = engine_for("h2o", kv_memory=int(1.5 * bytes_of(request("one", "full"))))
    add(small, request("there", "full"))
    run(small, 2)
    held = small.stats().kv_bytes
    with pytest.raises(PoolFullError, match=r"leave no room for .* bytes"):
        small.import_request(data)
    small.check_integrity()
    assert small.stats().kv_bytes == held
    assert len(small._sampler) == 1
    small.drain()
    small.import_request(data)  # now there is room
    with pytest.raises(OptionError, match="'moved' is in flight already"):
        small.import_request(data)
    small.drain()
    small.close()
    with pytest.raises(OptionError, match="no request 'moved' is in flight"):
        first.export_request("moved")
    other = Engine(shared_model("qwen3"), method="h2o", budget="30%")
    with pytest.raises(CacheMismatchError, match="another model"):
        other.import_request(data)
    other.close()


def test_the_same_options_on_both_sides(pair: tuple[Engine, Engine]) -> None:
    """What a request does not say is the engine's default, which may differ."""
    first, _ = pair
    asked = Request(
        request_id="default", prompt=prompt(LENGTH), params=mp.SamplingParams(max_tokens=NEW, temperature=0)
    )
    add(first, asked)
    run(first, 2)
    data = first.export_request("default")
    other = engine_for("h2o", page_slots=8)
    second = Engine(shared_model("llama"), method="snapkv", budget="30%")
    with pytest.raises(CacheMismatchError, match=r"kept as h2o\(\) .* kept as snapkv\(\)"):
        second.import_request(data)
    assert not second.busy
    assert other.import_request(data) == "default"
    for engine in (other, second):
        engine.close()


def test_texts_in_a_snapshot_are_checked() -> None:
    """A value of another type than the field has is refused by name, and none is taken over as it is."""
    with pytest.raises(DataError, match="'16' is none of"):
        from_json(mp.SamplingParams, {"max_tokens": "16"})
    with pytest.raises(DataError, match="does not hold the fields of SamplingParams"):
        from_json(mp.SamplingParams, {"__class__": 1})
    assert from_json(mp.SamplingParams, {"stop": ["a", "b"], "logit_bias": {"3": 1}}) == mp.SamplingParams(
        stop=("a", "b"), logit_bias={3: 1}
    )
