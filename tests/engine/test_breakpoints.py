"""Breakpoints: methods that sum over all queries go on from what others have read, and no token changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.llm import LLM
from millpond.engine.outputs import RequestOutput
from millpond.engine.prompt_marks import block_ends, common_ends
from millpond.engine.request import CacheOptions, Request
from millpond.errors import NumericsError, OptionError
from millpond.prompt_marks import PromptMarks
from tests.engine.test_codecs import model as wide_model
from tests.engine.test_prefix_cache_full_pool import bytes_of
from tests.helpers.engine.helpers import METHODS, add, budget_of, greedy, prompt
from tests.helpers.hf.families import shared_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BASE = prompt(57)
FIRST, SECOND, THIRD = BASE[:50] + prompt(23), BASE[:50] + prompt(31), BASE[:50] + prompt(31) + prompt(40)[:17]

#: name -> method and options: sums of attention, moments of queries, and the queries themselves.
SUMMING: dict[str, tuple[str, dict[str, Any]]] = {
    "h2o": ("h2o", {}),
    "h2o:decay": ("h2o", {"decay": 0.9, "reduce": "max"}),
    "ada:h2o": ("ada", {"score": "h2o"}),
    "expected_attention": ("expected_attention", {}),
    "fastgen": ("fastgen", METHODS["fastgen"]),
}
SEEDED = mp.SamplingParams(max_tokens=5, temperature=0.9, seed=3, n=2)


def engine_of(name: str, codec: str | None = None, **options: Any) -> Engine:
    method, own = SUMMING.get(name) or (name, METHODS[name])
    model = shared_model("llama") if codec is None else wide_model()
    chosen = {"max_step_tokens": 16, "page_slots": 4, "prefix_cache": True} | options
    return Engine(model, method=method, options=own, budget=budget_of(method), codec=codec, **chosen)


def asked(name: str, ids: tuple[int, ...], *places: int, params: Any = None, **rest: Any) -> Request:
    return Request(
        request_id=name, prompt=ids, params=params or greedy(5), marks=PromptMarks(breakpoints=places), **rest
    )


def most_alone(engine: Engine, *requests: Request) -> int:
    """The most bytes that one of these requests may need with the engine to itself, which is closed."""
    found = max(engine._validator.validate(request).scheduled.memory_need.peak(1) for request in requests)
    engine.close()
    return found


def finish(engine: Engine, *requests: Request) -> dict[str, RequestOutput]:
    """Add requests together and step until all is done, with every page checked behind each step."""
    add(engine, *requests)
    done: dict[str, RequestOutput] = {}
    while engine.busy:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
    return done


def answers(output: RequestOutput) -> list[tuple[int, ...]]:
    assert output.error is None
    return [one.token_ids for one in output.completions]


def shared(output: RequestOutput) -> int:
    kv = output.completions[0].kv
    assert kv is not None
    return kv.shared_tokens


@cache
def fresh(name: str, ids: tuple[int, ...], codec: str | None = None, seeded: bool = False) -> list[tuple[int, ...]]:
    engine = engine_of(name, codec, prefix_cache=False, max_step_tokens=64)
    done = finish(engine, asked("alone", ids, params=SEEDED if seeded else None))
    engine.close()
    return answers(done["alone"])


@pytest.mark.covering
@pytest.mark.parametrize("codec", [None, "int4"])
@pytest.mark.parametrize("step", [7, 64])
@pytest.mark.parametrize("name", SUMMING)
def test_turns_go_on_from_breakpoints_with_the_tokens_of_a_fresh_engine(
    name: str, step: int, codec: str | None
) -> None:
    engine = engine_of(name, codec, max_step_tokens=step)
    places = {FIRST: (50,), SECOND: (50, len(SECOND)), THIRD: ()}
    for number, (ids, own) in enumerate(places.items()):
        output = finish(engine, asked(str(number), ids, *own))[str(number)]
        assert answers(output) == fresh(name, ids, codec)
        assert shared(output) == (0, 48, 80)[number]
    assert engine.stats().prompt_tokens == len(FIRST) + len(SECOND) - 48 + len(THIRD) - 80
    engine.close()
    assert engine.stats().kv_reserved == 0


@pytest.mark.parametrize("name", ["h2o", "expected_attention"])
def test_seeds_and_several_answers(name: str) -> None:
    engine = engine_of(name)
    finish(engine, asked("a", FIRST, 50))
    output = finish(engine, asked("b", SECOND, params=SEEDED))["b"]
    assert shared(output) == 48
    assert answers(output) == fresh(name, SECOND, seeded=True)
    engine.close()


@pytest.mark.parametrize("name", SUMMING)
def test_bytes_of_sums_grow_by_each_breakpoint_and_are_freed_with_their_blocks(name: str) -> None:
    sizes = []
    for places in ((), (20,), (20, 40), (20, 40, 60)):
        engine = engine_of(name)
        finish(engine, asked("a", THIRD, *places))
        found = engine.stats()
        assert found.prefix is not None
        assert found.prefix.blocks == max(places, default=0) // 4
        sizes.append(found.prefix.sums_bytes)
        assert found.kv_bytes > found.prefix.sums_bytes or not places, "sums are counted with the pages"
        engine._parts.prefix_cache.tree.clear()
        engine.check_integrity()
        engine._parts.trim()
        assert engine._parts.memory.nbytes == 0
        engine.close()
    more = np.diff(sizes)
    assert more[0] > 0
    if name.startswith(("h2o", "ada")):
        assert more.tolist() == [more[0], 2 * more[0], 3 * more[0]], "a number for each entry before the place"
    elif name == "expected_attention":
        assert more.tolist() == [more[0]] * 3, "moments have one size"
    else:
        entries = more[0] - (more[2] - more[1])  # sums grow with the place; queries are kept once
        assert more.tolist() == [more[0], more[0] + (more[1] - more[0]), more[1] + (more[1] - more[0])]
        assert entries != more[0]


@pytest.mark.parametrize("name", ["h2o", "fastgen", "expected_attention"])
def test_prompts_that_arrive_together_on_a_cold_engine_read_their_beginning_once(name: str) -> None:
    """None has breakpoints: the first stops where the others go on, and they wait, however many steps that takes."""
    prompts = [(*BASE[:53], n, n + 1, n + 2, *prompt(31)[: 4 * n]) for n in range(2, 7)]
    engine = engine_of(name, max_step_tokens=4)
    done = finish(engine, *(asked(str(n), ids) for n, ids in enumerate(prompts)))
    assert [shared(done[str(n)]) for n in range(5)] == [0, 52, 52, 52, 52]
    assert engine.stats().prompt_tokens == sum(map(len, prompts)) - 4 * 52
    for n, ids in enumerate(prompts):
        assert answers(done[str(n)]) == fresh(name, ids)
    engine.close()


def test_a_reader_that_is_cancelled_holds_nobody_up() -> None:
    engine = engine_of("h2o", max_step_tokens=8)
    add(engine, asked("a", FIRST, 50), asked("b", SECOND))
    for _ in range(3):
        engine.step()
    engine.cancel("a")
    done = finish(engine)
    assert answers(done["b"]) == fresh("h2o", SECOND)
    assert shared(done["b"]) == 0
    engine.close()


@pytest.mark.parametrize("name", ["full", "snapkv", "streaming"])
def test_methods_without_sums_are_read_in_the_same_steps(name: str) -> None:
    steps = []
    for places in ((), (20, 40)):
        engine = engine_of(name, max_step_tokens=64)
        seen: list[int] = []
        engine.on_step = lambda step, _, seen=seen: seen.extend(n for _, n in step.prefills)  # type: ignore[misc]
        finish(engine, asked("a", THIRD, *places))
        steps.append(seen)
        engine.close()
    assert steps[0] == steps[1]


def test_methods_share_with_those_that_sum_alike_alone() -> None:
    engine = engine_of("h2o")
    finish(engine, asked("a", FIRST, 50))

    def from_h2o(method: str, **options: Any) -> int:
        chosen = CacheOptions(method=method, budget=budget_of(method), options=options)
        (output,) = finish(engine, asked("b", SECOND, cache=chosen)).values()
        return shared(output)

    assert from_h2o("h2o", recent=0.3) == 48
    assert from_h2o("ada", score="h2o") == 48
    assert from_h2o("h2o", decay=0.9) == 0
    assert from_h2o("h2o", reduce="max") == 0
    assert from_h2o("expected_attention") == 0
    assert from_h2o("full") == 0, "the pages hold other scores"
    engine.close()


def test_salts_and_formats_keep_breakpoints_apart() -> None:
    engine = engine_of("h2o")
    finish(engine, replace(asked("a", FIRST, 50), cache_salt="one"))
    found = [shared(finish(engine, replace(asked("b", SECOND), cache_salt=salt))["b"]) for salt in ("two", None, "one")]
    assert found == [0, 0, 48]
    half = replace(asked("c", SECOND), cache_salt="one", cache=CacheOptions(codec="bf16"))
    assert shared(finish(engine, half)["c"]) == 0
    engine.close()


@pytest.mark.parametrize("name", ["h2o", "expected_attention", "fastgen"])
def test_what_is_kept_goes_when_a_request_needs_all_memory(name: str) -> None:
    """The limit holds one prompt, read behind pages that the tree holds too."""
    probe = engine_of(name, prefix_cache=False)
    need = probe._validator.validate(asked("a", THIRD)).scheduled.memory_need.peak(1)
    probe.close()
    engine = engine_of(name, kv_memory=need + 4096)
    limit = need + 4096
    for number, ids in enumerate((FIRST, SECOND, THIRD, THIRD)):
        output = finish(engine, asked(str(number), ids, 50, len(ids)))[str(number)]
        assert answers(output) == fresh(name, ids)
        assert engine.stats().kv_reserved <= limit
    engine.close()


def test_a_prompt_whose_block_was_evicted_is_read_again() -> None:
    engine = engine_of("h2o")
    finish(engine, asked("a", FIRST, 50))
    engine._parts.prefix_cache.tree.evict(lambda: len(engine._parts.prefix_cache.tree) < 12)
    output = finish(engine, asked("b", SECOND, 50))["b"]
    assert shared(output) == 0
    assert answers(output) == fresh("h2o", SECOND)
    assert shared(finish(engine, asked("c", SECOND))["c"]) == 48
    engine.close()


@pytest.mark.covering
@pytest.mark.parametrize("name", ["h2o", "fastgen", "expected_attention"])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_and_no_page_is_held(seed: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns in random order, limits, overcommitment, swaps, cancels in the middle, evictions, and passes that fail."""
    rng = np.random.default_rng(100 * seed + len(name))
    ids = [FIRST, SECOND, THIRD, FIRST[:60], THIRD + FIRST[:9], SECOND]
    prompts = [ids[n] for n in rng.integers(0, len(ids), 9)]
    limit = [None, bytes_of(len(THIRD) + 30, new=6), bytes_of(3 * len(THIRD), new=6)][seed]
    if limit is not None:  # the least that the longest one needs alone, with what its method holds besides pages
        limit = max(limit, most_alone(engine_of(name), *(asked("probe", one) for one in ids)))
    engine = engine_of(
        name, kv_memory=limit, overcommit=float(rng.choice([1.0, 2.0])), max_step_tokens=int(rng.choice([6, 24, 64]))
    )
    forward, passes, fails = engine._model.forward, 0, set(rng.choice(30, 1).tolist())

    def failing(*args: Any, **rest: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes in fails:
            raise NumericsError("the pass failed")
        return forward(*args, **rest)

    monkeypatch.setattr(engine._model, "forward", failing)
    waiting = [
        asked(str(n), one, *sorted(rng.integers(1, len(one) + 1, int(rng.integers(4))).tolist()))
        for n, one in enumerate(prompts)
    ]
    done: dict[str, RequestOutput] = {}
    while waiting or engine.busy:
        if waiting and rng.integers(3) == 0:
            add(engine, waiting.pop())
        if rng.integers(12) == 0:
            engine.cancel(str(rng.integers(len(prompts))))
        if rng.integers(12) == 0:
            until = len(engine._parts.prefix_cache.tree) // 2
            engine._parts.prefix_cache.tree.evict(lambda until=until: len(engine._parts.prefix_cache.tree) <= until)  # type: ignore[misc]
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
        assert limit is None or engine.stats().kv_reserved <= limit
    assert len(done) == len(prompts)
    for number, output in done.items():
        (completion,) = output.completions
        right = fresh(name, prompts[int(number)])[0]
        assert completion.token_ids == right[: len(completion.token_ids)]
        assert completion.finish_reason in ("length", "cancelled") or isinstance(output.error, NumericsError)
    engine._parts.prefix_cache.tree.clear()
    engine._parts.trim()
    assert engine._parts.memory.nbytes == 0
    engine.close()


def test_an_llm_takes_breakpoints_of_all_prompts_or_of_each() -> None:
    with LLM(shared_model("llama"), method="h2o", budget="30%", page_slots=4, prefix_cache=True) as llm:
        llm.generate([FIRST], greedy(2), marks=PromptMarks(breakpoints=(50,)))
        found = llm.generate([SECOND, THIRD], greedy(2), marks=[PromptMarks(), PromptMarks(breakpoints=(70,))])
        assert [shared(output) for output in found] == [48, 80], "the second prompt begins the third"
        assert [answers(output)[0] for output in found] == [fresh("h2o", one)[0][:2] for one in (SECOND, THIRD)]
        with pytest.raises(OptionError, match="3 marks for 2 prompts"):
            llm.generate([SECOND, THIRD], greedy(2), marks=[PromptMarks()] * 3)
        for cache_options, why in (
            (CacheOptions(method="streaming", budget=16), "streaming.* shares no beginnings of prompts"),
            (CacheOptions(method="h2o", options={"prefill": "greedy"}), "h2o.* shares no beginnings of prompts"),
        ):
            with pytest.raises(OptionError, match=why):
                llm.generate([SECOND], greedy(2), cache=cache_options, marks=PromptMarks(breakpoints=(50,)))
        with pytest.raises(OptionError, match="log probabilities are wanted"):
            llm.generate([SECOND], greedy(2, prompt_logprobs=1), marks=PromptMarks(breakpoints=(50,)))
        assert not llm.engine.busy
    with (
        LLM(shared_model("llama"), method="h2o", budget="30%") as llm,
        pytest.raises(OptionError, match="prefix_cache"),
    ):
        llm.generate([FIRST], greedy(2), marks=PromptMarks(breakpoints=(50,)))


@pytest.mark.parametrize(
    ("places", "why"),
    [
        ((0,), "breakpoint 0 must be a number of tokens, from 1 on"),
        ((74,), "breakpoint 74 must be a number of tokens from 1 to the prompt's 73"),
        ((True,), "breakpoint True"),
        ((1, 2, 3, 4, 5), "5 breakpoints: must be at most 4"),
    ],
)
def test_breakpoints_outside_the_prompt_are_refused(places: tuple[int, ...], why: str) -> None:
    engine = engine_of("h2o")
    with pytest.raises(OptionError, match=why):
        engine.add(asked("a", FIRST, *places))
    assert not engine.busy
    engine.close()


def test_ends_of_blocks() -> None:
    assert block_ends([1, 3], 20, 4) == []
    assert block_ends([4, 7, 9, 20], 20, 4) == [4, 8, 16]
    text = np.arange(40)
    other = np.where(np.arange(40) < 22, text, -1)
    assert common_ends(text, [other, text, other[:10], text[::-1]], 4) == [8, 20, 36]
    assert common_ends(text[:12], [text], 4) == [8], "its last token is read for it"
    ways = [np.where(np.arange(40) < n, text, -1) for n in range(4, 40, 4)]
    assert len(common_ends(text, ways, 4)) == 4
