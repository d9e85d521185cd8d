"""Faults that are planted into the work of one of four requests: it ends with an error, and the others go on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.planning.planner import Planner
from millpond.engine.detokenizer import Writer
from millpond.engine.engine import Engine
from millpond.engine.grammar.compiler import Constraints, _Followed
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.engine.request_state import RequestState
from millpond.engine.sampling.banned_tokens import Forbidden
from millpond.engine.sampling.penalties import Penalties
from millpond.errors import MillpondError
from millpond.kernels import native
from tests.engine.test_codecs import model
from tests.engine.test_constraint import byte_tokenizer

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason="needs the native kernels"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

#: A method, its budget and its format.
WAYS: dict[str, tuple[str, str | None, str]] = {
    "full": ("full", None, "auto"),
    "h2o": ("h2o", "50%", "auto"),
    "snapkv int4": ("snapkv", "50%", "int4"),
    "h2o rotated4": ("h2o", "70%", "rotated4"),
}
VICTIM, NEW = "victim", 20
LENGTHS = {"one": 150, VICTIM: 130, "two": 211, "three": 96}
#: Without `deterministic`, greedy tokens may part where the two best logits lie closer than this.
CLOSE = 1e-3


class Fault(Exception):
    """What is planted."""


def request(name: str, **more: Any) -> Request:
    ids = torch.randint(2, 96, (LENGTHS[name],), generator=torch.Generator().manual_seed(LENGTHS[name])).tolist()
    params = {"max_tokens": NEW, "temperature": 0.0, "logprobs": 2, "ignore_eos": True} | more
    return Request(request_id=name, prompt=tuple(ids), params=mp.SamplingParams(**params), watch=True)


def engine_of(way: str, **options: Any) -> Engine:
    method, budget, codec = WAYS[way]
    chosen = {"deterministic": True, "max_step_tokens": 256, "page_slots": 16} | options
    return Engine(model(), byte_tokenizer(), method=method, budget=budget, codec=codec, **chosen)


def run(engine: Engine) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    for _ in range(600):
        if not engine.busy:
            return done
        for output in engine.step():
            shown = done.get(output.request_id, output).completions[0].token_ids
            assert output.completions[0].token_ids[: len(shown)] == shown, "an answer was taken back"
            done[output.request_id] = output
        engine.check_integrity()
    raise AssertionError("somebody starved")


def undisturbed(way: str, **options: Any) -> tuple[dict[str, RequestOutput], dict[str, list[Any]]]:
    """What the neighbours are without the victim, and what their caches held at the end."""
    engine = engine_of(way, **options)
    for name in LENGTHS:
        if name != VICTIM:
            engine.add(request(name))
    done = run(engine)
    held = {name: caches(engine, name) for name in done}
    engine.close()
    return done, held


def caches(engine: Engine, name: str) -> list[Any]:
    """Kept positions, scores and bytes in pages of every layer, of a request that has ended."""
    found = [engine.memory(name, layer) for layer in range(len(engine.layers))]
    assert None not in found
    return [(one.kept, one.scores, one.kv) for one in found]


def check(engine: Engine, done: dict[str, RequestOutput], way: str, error: str = "Fault") -> None:
    """The victim has failed, the others have the same bits as without it, and nothing is left."""
    failed = done[VICTIM]
    assert failed.error is not None
    assert error in str(failed.error)
    assert all(completion.finish_reason == "error" for completion in failed.completions)
    expected, held = undisturbed(way)
    for name, output in expected.items():
        assert done[name].error is None
        assert done[name].completions == output.completions
        assert caches(engine, name) == held[name]
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.swapped, stats.kv_bytes, stats.kv_reserved) == (0, 0, 0, 0, 0)
    assert stats.finished == len(LENGTHS)
    assert stats.generated_tokens == sum(len(c.token_ids) for output in done.values() for c in output.completions)
    assert len(engine._sampler) == 0
    assert not engine._scheduler._requests


def live_of(engine: Engine) -> RequestState | None:
    return engine._requests.get(VICTIM)


def layers_of(engine: Engine) -> list[LayerCache]:
    """The layers that hold the victim now."""
    state = live_of(engine)
    if state is None:
        return []
    if state.private_cache is not None:
        return state.private_cache.layers
    return state.group.batch_cache.layers if state.completions[0] in state.group.completions else []


def raise_behind(
    patch: pytest.MonkeyPatch, of: type, name: str, where: Callable[..., bool], times: list[int] | None = None
) -> list[int]:
    """Let a method do its work and then raise, where `where` says so; returns a list with an entry for each time."""
    real, times = getattr(of, name), [] if times is None else times

    def failing(self: Any, *args: Any, **options: Any) -> Any:
        here = where(self, *args, **options)
        found = real(self, *args, **options)
        if here:
            times.append(1)
            raise Fault("planted")
        return found

    patch.setattr(of, name, failing)
    return times


def plant_in_prompt(patch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    """Layer 0 and 1 have stored the entries of a part of the prompt."""

    def where(self: LayerCache, *_: Any, **__: Any) -> bool:
        state = live_of(engine)
        return (
            self.index == 1
            and state is not None
            and state.private_cache is not None
            and self in state.private_cache.layers
        )

    return raise_behind(patch, LayerCache, "_close_pass", where)


def plant_in_step(patch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    """Layer 0 and 1 have stored the entry of the fifth token."""

    def where(self: LayerCache, *_: Any, **__: Any) -> bool:
        state = live_of(engine)
        late = (
            state is not None
            and state.private_cache is None
            and len(state.completions[0].tokens) >= 5
            and not state.replaying
        )
        return late and self.index == 1 and self in layers_of(engine)

    times: list[int] = []
    for name in ("_close_pass", "attend_newest", "end_step"):  # of layers one by one, and of all in one native call
        raise_behind(patch, LayerCache, name, where, times)
    return times


def plant_in_plan(patch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    """Layer 0 has its plan, and so has layer 1."""

    def where(self: Planner, *_: Any, **__: Any) -> bool:
        return any(layer_cache.planner is self and layer_cache.index == 1 for layer_cache in layers_of(engine))

    def joint(self: LayerCache, *_: Any, **__: Any) -> bool:
        return self.index == 1 and self in layers_of(engine)

    times = raise_behind(patch, LayerCache, "end_joint_plan", joint)
    return raise_behind(patch, Planner, "plan", where, times)


def plant_in_codec(patch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    """Layer 0 has its codes, and layer 1 those of the plan."""

    def where(self: QuantizedStore, *_: Any, **__: Any) -> bool:
        tables = [layer_cache.table for layer_cache in layers_of(engine) if layer_cache.index == 1]
        return any(table is not None and self in table.packed_parts for table in tables)

    times = raise_behind(patch, QuantizedStore, "begin", where)
    return raise_behind(patch, QuantizedStore, "write_all", where, times)


def plant_in_sampler(patch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    return raise_behind(patch, Penalties, "apply_", lambda self, keys, *_: (VICTIM, 0) in keys)


def plant_in_grammar(patch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    return raise_behind(patch, Constraints, "apply_", lambda self, keys, logits: (VICTIM, 0) in keys)


class Matcher:
    """Of a grammar that is fulfilled, and fails behind the third token."""

    def __init__(self) -> None:
        self.calls = 0

    def is_terminated(self) -> bool:
        self.calls += 1
        if self.calls == 6:  # each token is looked at before it is chosen and behind it
            raise Fault("planted")
        return True


def plant_behind_grammar(patch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    matcher = Matcher()
    patch.setitem(engine._sampler._constraints._followed, (VICTIM, 0), _Followed(matcher, None))  # type: ignore[arg-type]
    return Calls(matcher)


class Calls(list[int]):
    """True once a matcher has failed."""

    def __init__(self, matcher: Matcher) -> None:
        super().__init__()
        self.matcher = matcher

    def __bool__(self) -> bool:
        return self.matcher.calls >= 6


def plant_in_bans(patch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    return raise_behind(patch, Forbidden, "apply_", lambda self, keys, logits: (VICTIM, 0) in keys)


def plant_in_text(patch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    def where(self: Writer, *_: Any) -> bool:
        state = live_of(engine)
        return state is not None and state.completions[0]._writer is self and len(state.completions[0].tokens) > 3

    raise_behind(patch, Writer, "finish", lambda self: where(self))
    return raise_behind(patch, Writer, "add", where)


PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch, Engine], list[int]], dict[str, Any]]] = {
    "prompt": (plant_in_prompt, {}),
    "step": (plant_in_step, {}),
    "plan": (plant_in_plan, {}),
    "codec": (plant_in_codec, {}),
    "sampling": (plant_in_sampler, {"temperature": 0.7, "seed": 3, "presence_penalty": 0.5}),
    "bans": (plant_in_bans, {"allowed_token_ids": tuple(range(50))}),
    "behind a grammar": (plant_behind_grammar, {}),
    "grammar": (plant_in_grammar, {"regex": "[a-z]+", "ignore_eos": False}),
    "text": (plant_in_text, {}),
}
CASES = [
    (place, way)
    for place in PLANTS
    for way in WAYS
    if not (place == "codec" and WAYS[way][2] == "auto") and not (place == "plan" and way == "full")
]


def options_of(place: str) -> dict[str, Any]:
    if place == "grammar":
        pytest.importorskip("xgrammar", reason="the extra 'constrained' is not installed")
    return PLANTS[place][1]


@pytest.mark.covering
@pytest.mark.parametrize(("place", "way"), CASES)
def test_a_fault_ends_its_request_and_no_other(
    place: str, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    more = options_of(place)
    engine = engine_of(way)
    for name in LENGTHS:
        engine.add(request(name, **(more if name == VICTIM else {})))
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        times = PLANTS[place][0](patch, engine)
        done = run(engine)
    assert times, "nothing was planted"
    check(engine, done, way)
    logged = [record for record in caplog.records if VICTIM in record.getMessage() and record.exc_info]
    assert logged, "no traceback under the id of the request"
    engine.close()


def test_a_fault_that_does_not_come_again_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("h2o")
    for name in LENGTHS:
        engine.add(request(name))
    real, left = type(engine._model).forward, [12]

    def failing(*args: Any) -> Any:
        found = real(*args)
        left[0] -= 1
        if not left[0]:
            raise Fault("once")
        return found

    monkeypatch.setattr(type(engine._model), "forward", failing)
    done = run(engine)
    assert engine._faults.n_restarted > 1
    expected, held = undisturbed("h2o")
    for name, output in expected.items():
        assert done[name].completions == output.completions
        assert caches(engine, name) == held[name]
    assert done[VICTIM].error is None
    engine.close()


def test_without_deterministic_greedy_tokens_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("h2o", deterministic=False)
    for name in LENGTHS:
        engine.add(request(name))
    with monkeypatch.context() as patch:
        assert plant_in_step(patch, engine) is not None
        done = run(engine)
    expected, _ = undisturbed("h2o", deterministic=False)
    parted = 0
    for name, output in expected.items():
        found, before = done[name].completions[0], output.completions[0]
        differ = [n for n, pair in enumerate(zip(found.token_ids, before.token_ids, strict=True)) if len({*pair}) > 1]
        if differ:
            assert before.logprobs is not None
            (_, best, _), (_, second, _) = before.logprobs[differ[0]].top
            assert best - second < CLOSE, f"{name} parts at token {differ[0]}"
            parted += 1
    assert parted <= 1
    engine.close()


def test_what_fails_for_each_alone_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("h2o")
    for name in LENGTHS:
        engine.add(request(name))
    for _ in range(8):
        engine.step()

    def failing(*_: Any) -> Any:
        raise Fault("always")

    monkeypatch.setattr(engine._model, "forward", failing)
    with pytest.raises(Fault, match="always"):
        run(engine)
    ended = {output.request_id: output for output in engine.abort_all(MillpondError("over"))}
    assert set(ended) <= set(LENGTHS)
    engine.check_integrity()
    assert engine.stats().kv_bytes == 0
    engine.close()


def answers(done: dict[str, RequestOutput]) -> dict[str, list[tuple[int, ...]]]:
    return {name: [one.token_ids for one in output.completions] for name, output in done.items()}


class Sometimes:
    """A pass that fails for a request behind some of its tokens, and now and then for no reason."""

    def __init__(self, engine: Engine, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.engine, self.real = engine, engine._executor.run
        self.generator = torch.Generator().manual_seed(seed)
        self.at = int(torch.randint(0, NEW, (1,), generator=self.generator))
        forward = engine._model.forward

        def failing(*args: Any) -> Any:
            found = forward(*args)
            state = engine._requests.get(VICTIM)
            taking = state is not None and state in self.lives and not state.replaying
            if (taking and len(state.completions[0].tokens) >= self.at) or self.chance():
                raise Fault("planted")
            return found

        def run(groups: Any, reading: Any) -> Any:
            keys = [completion.key[0] for group in groups for completion in group.completions]
            self.lives = {*(engine._requests[key] for key in keys), *(live for live, _ in reading)}
            return self.real(groups, reading)

        patch.setattr(engine._model, "forward", failing)
        patch.setattr(engine._executor, "run", run)
        self.left = 3

    def chance(self) -> bool:
        found = len(self.lives) > 1 and self.left > 0 and bool(torch.rand(1, generator=self.generator) < 0.1)
        self.left -= found
        return found


@pytest.mark.covering
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options",
    [
        {"max_step_tokens": 64, "prefix_cache": True, "prompt": "shared", "deterministic": False},
        {"kv_memory": "800KiB", "overcommit": 3.0},
        {"planned": True, "deterministic": False},
    ],
    ids=["shared", "preempted", "planned"],
)
def test_faults_at_any_time(options: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in parts that begin alike, requests that are preempted, and shared prefixes; two answers each."""
    chosen, way = dict(options), list(WAYS)[seed % len(WAYS)]
    common = tuple(range(2, 66)) if chosen.pop("prompt", None) else ()
    planned, found = chosen.pop("planned", False), []
    if planned:
        common = tuple(range(2, 66))
    for disturbed in (False, True):
        engine = engine_of(way, **chosen)
        with monkeypatch.context() as patch:
            if disturbed:
                Sometimes(engine, seed, patch)
            asked = [request(name, n=1 + len(name) % 2) for name in LENGTHS if disturbed or name != VICTIM]
            asked = [replace(one, prompt=(*common, *one.prompt)) for one in asked]  # type: ignore[misc]
            if planned:
                engine.add_batch(asked)
            else:
                for one in asked:
                    engine.add(one)
            done = run(engine)
        if disturbed:
            assert "Fault" in str(done[VICTIM].error)
            assert all(output.error is None for name, output in done.items() if name != VICTIM)
        found.append({name: tokens for name, tokens in answers(done).items() if name != VICTIM})
        engine._parts.prefix_cache.tree.clear()
        engine._parts.trim()
        assert engine._parts.memory.nbytes == 0
        engine.close()
    assert found[0] == found[1]
