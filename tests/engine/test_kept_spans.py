"""Kept spans of requests: held while decoding, whatever runs in the same batch, wherever they go."""

from __future__ import annotations

from typing import Any

import pytest

import millpond as mp
from millpond.engine.cache_snapshots import held_positions
from millpond.engine.engine import Engine
from millpond.errors import BudgetError, OptionError
from millpond.prompt_marks import PromptMarks
from tests.helpers.engine.helpers import METHODS, add, ask, budget_of, engine_for, finish, greedy, prompt, tokens
from tests.helpers.hf.families import shared_model

LENGTH = 57
SPANS = ((5, 9), (12, 15))
KEPT = {position for begin, end in SPANS for position in range(begin, end)}


OPTIONS = METHODS | {"snapkv": {"window": 4}, "pyramidkv": {"score": "snapkv/window=4"}}


def small_engine(method: str, **more: Any) -> Engine:
    return Engine(
        shared_model("llama"),
        method=method,
        options=OPTIONS[method],
        budget="30%",
        max_step_tokens=16,
        page_slots=4,
        **more,
    )


def steps_that_hold(engine: Engine, names: tuple[str, ...]) -> dict[str, Any]:
    """Step to the end; after each step the named requests that have read their prompts hold their spans."""
    done, seen = {}, 0
    while engine.busy:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        for name in names:
            found = engine.cache_of(name)
            if found is None or int(found[0].tracker.seen[found[1]]) < LENGTH:
                continue
            seen += 1
            for layer in found[0].layers:
                assert layer.table is not None
                for positions in zip(*held_positions(layer, found[1]), strict=True):
                    held = {int(position) for part in positions for position in part}
                    assert held >= KEPT
        engine.check_integrity()
    assert seen >= 3 * len(names)
    return done


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", ["h2o", "snapkv", "fastgen", "pyramidkv"])
def test_requests_hold_them_and_others_answer_as_before(method: str) -> None:
    alone = small_engine(method)
    add(alone, ask(40), ask(31))
    before = finish(alone)
    alone.close()
    engine = small_engine(method)
    add(engine, ask(40), ask(LENGTH, name="kept", marks=PromptMarks(keep=SPANS)), ask(31))
    done = steps_that_hold(engine, ("kept",))
    for name in ("40", "31"):
        assert tokens(done[name]) == tokens(before[name])
    assert done["kept"].error is None
    engine.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_answers_of_one_prompt_and_prefixes_hold_them() -> None:
    engine = small_engine("snapkv", prefix_cache="lru")
    add(engine, ask(LENGTH, name="first"))
    while not any(output.finished for output in engine.step()):
        pass
    both = [ask(LENGTH, name=name, params=greedy(n=2), marks=PromptMarks(keep=SPANS)) for name in ("kept", "again")]
    add(engine, *both, ask(40), ask(31))
    done = steps_that_hold(engine, ("kept", "again"))
    assert engine.stats().shared_tokens
    assert {len(tokens(done["kept"], index)) for index in (0, 1)} == {len(tokens(done["40"]))}
    engine.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_requests_that_leave_the_pool_come_back_with_them() -> None:
    engine = small_engine("snapkv", prefix_cache=False, kv_memory="40kB", overcommit=4)
    names = tuple(f"kept {n}" for n in range(4))
    add(engine, *(ask(LENGTH, greedy(40), name=name, marks=PromptMarks(keep=SPANS)) for name in names))
    steps_that_hold(engine, names)
    assert engine.stats().preemptions, "a limit that does not matter tests nothing"
    engine.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_request_that_moves_takes_them_along() -> None:
    here, there, whole = (engine_for("window") for _ in range(3))
    add(here, ask(LENGTH, name="kept", marks=PromptMarks(keep=SPANS)))
    add(whole, ask(LENGTH, name="kept", marks=PromptMarks(keep=SPANS)))
    while not (found := here.step()) or len(found[0].completions[0].token_ids) < 3:
        pass
    there.import_request(here.export_request("kept"))
    assert tokens(steps_that_hold(there, ("kept",))["kept"]) == tokens(finish(whole)["kept"])
    for engine in (here, there, whole):
        engine.close()


def test_generate_takes_them() -> None:
    with mp.LLM(shared_model("llama"), method="window", budget=24, page_slots=4) as llm:
        (plain,), (kept,), (none,) = (
            llm.generate(list(prompt(LENGTH)), greedy(), marks=PromptMarks(keep=keep))
            for keep in ((), SPANS, ((3, 3),))
        )
    assert tokens(plain) == tokens(none)
    assert kept.completions[0].kv is not None
    assert plain.completions[0].kv is not None
    assert kept.completions[0].kv.held == plain.completions[0].kv.held == 24


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("method", "budget", "keep", "error", "match"),
    [
        ("h2o", 20, ((0, LENGTH + 1),), OptionError, "must lie in the prompt"),
        ("h2o", 20, ((4, 3),), OptionError, "keep: .* is no span"),
        ("h2o", 20, ((0, 4), (3, 6)), OptionError, "overlaps"),
        ("h2o", 20, ((4, 30),), BudgetError, "26 kept tokens and 4 entries .* budget of 20 entries .* to 30 or more"),
        ("h2o", "30%", ((4, 30),), BudgetError, "30%: 26 kept tokens and 4 entries .* budget of 17 entries"),
        ("h2o", "8KiB", ((4, 56),), BudgetError, "52 kept tokens"),
        ("streaming", 20, SPANS, OptionError, "positions='absolute'"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_it_is_read(
    method: str, budget: Any, keep: Any, error: type[Exception], match: str
) -> None:
    engine = Engine(shared_model("llama"), method=method, options=METHODS[method], budget=budget, page_slots=4)
    with pytest.raises(error, match=match):
        engine.add(ask(LENGTH, marks=PromptMarks(keep=keep)))
    assert not engine.busy
    engine.close()
    assert budget_of("full") is None
